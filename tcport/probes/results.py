"""Running the probes once per device, driver, compiler and kernel source, and keeping what they found."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from tcport.counting import count
from tcport.device import DeviceProfile, device_profile
from tcport.fingerprint import triton_version
from tcport.ir import TileConfig
from tcport.logs import logger
from tcport.tiling.footprint import kernel_sources
from tcport.user_cache import cache_folder, keep, kept

TIME_LIMIT = 90.0
"""Seconds for all probes together; what is not done by then stays unknown."""

ENVIRONMENT_VARIABLE = "TCPORT_PROBES"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one probe found: ``ok``, and the numbers or the reason in one line."""

    ok: bool
    detail: str


def probe(profile: DeviceProfile) -> Mapping[str, Outcome]:
    """The outcomes of the capability probes and self-tests for a device, by name; a name that is absent is unknown.

    They run in a process of their own, on a device that is present, once: outcomes are kept on disk for the same
    device, driver, compiler and kernel sources. ``TCPORT_PROBES=0`` leaves everything unknown.
    """
    index = _present(profile)
    return {} if index is None else _kept(profile.digest(), index)


def trusted(kernel: str, profile: DeviceProfile, tile: TileConfig | None = None) -> str | None:
    """Why a kernel must not be used on a device: a self-test of it gave wrong numbers. None: it may be.

    Where some tiles were right, the others cost the trust of tiles that are at least as large in both directions: what
    a compiler gets wrong in a tile it may get wrong in a larger one. A test that could not be run (no memory, no time,
    no compiler) is no reason: what is wrong there shows by itself.
    """
    outcomes = {name: found for name, found in probe(profile).items() if name.split(" ")[0] == kernel}
    wrong = {name: found for name, found in outcomes.items() if not found.ok and "wrong numbers" in found.detail}
    some_right = any(found.ok for found in outcomes.values())
    for name, found in wrong.items():
        if tile is None or not some_right or _holds(tile, name):
            return f"{name}: {found.detail}"
    return None


def run_probes(index: int, time_limit: float = TIME_LIMIT) -> tuple[dict[str, Outcome], str]:
    """Run all probes on a device; the outcomes, and why there are not more of them ("" when all ran)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), ENVIRONMENT_VARIABLE: "0"}
    command = [sys.executable, "-m", "tcport.probes.worker", str(index)]
    trouble = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=time_limit)
        text = done.stdout
        if done.returncode != 0:
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
            trouble = f"the process ended with code {done.returncode}: {last}"
    except subprocess.TimeoutExpired as error:
        partial = error.stdout or ""
        text = partial.decode() if isinstance(partial, bytes) else partial
        trouble = f"not done in {time_limit:.0f} s"
    outcomes = {}
    for line in text.splitlines():
        if line.startswith("{") and line.endswith("}"):
            answer = json.loads(line)
            outcomes[answer["name"]] = Outcome(answer["ok"], answer["detail"])
    count("probes", len(outcomes))
    return outcomes, trouble


@functools.lru_cache(maxsize=32)
def _kept(digest: str, index: int) -> dict[str, Outcome]:
    versions = f"{digest} {triton_version()} {torch.__version__} {kernel_sources()}"
    path = cache_folder("probes") / f"{hashlib.sha256(versions.encode()).hexdigest()}.json"
    known = _load(path)
    if known is not None:
        return known
    outcomes, trouble = run_probes(index)
    for name, outcome in outcomes.items():
        logger("probes").info("%s: %s (%s)", name, "ok" if outcome.ok else "not there", outcome.detail)
    if trouble:
        # Not kept: the machine may have been short of memory or time. This process does not ask again.
        logger("probes").warning("some probes could not be run: %s", trouble)
    else:
        keep(path, {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()})
    return outcomes


def is_present(profile: DeviceProfile) -> bool:
    """Whether a profile describes the GPU that this process works with, and not one that is not in the room."""
    if profile.device_type != "cuda" or not torch.cuda.is_available():
        return False
    return device_profile(torch.device("cuda", torch.cuda.current_device())).digest() == profile.digest()


def _present(profile: DeviceProfile) -> int | None:
    """Index of the present device that a profile describes, unless probes are turned off."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE) != "0" and is_present(profile)
    return torch.cuda.current_device() if wanted else None


def _holds(tile: TileConfig, test: str) -> bool:
    """Whether a tile is at least as large as that of a self-test, named like ``"triton_decode 64x32 w4 st2"``."""
    size = re.search(r" (\d+)x(\d+)", test)
    return size is None or (tile.block_m >= int(size[1]) and tile.block_n >= int(size[2]))


def _load(path: Path) -> dict[str, Outcome] | None:
    try:
        return {name: Outcome(**found) for name, found in (kept(path) or {}).items()} or None
    except TypeError:  # damaged, or written by another version: probe again
        return None
