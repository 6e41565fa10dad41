"""Running the probes once per device, driver, compiler and kernel source, and keeping what they found."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tcport.counting import count
from tcport.device import DeviceProfile, device_profile
from tcport.fingerprint import triton_version
from tcport.ir import TileConfig
from tcport.locks import process_lock
from tcport.logs import logger
from tcport.tiling.sources import kernel_sources
from tcport.tiling.workers import answer_in
from tcport.user_cache import cache_folder, keep, kept

TIME_LIMIT = 90.0
"""Seconds for the probes of one group; what is not done by then stays unknown."""

CAPABILITIES = "capabilities"
FAMILIES = ("triton_decode", "triton_prefill", "hopper_prefill", "triton_write", "triton_merge")
"""The kernels that have self-tests."""

ENVIRONMENT_VARIABLE = "TCPORT_PROBES"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one probe found: ``ok``, and the numbers or the reason in one line."""

    ok: bool
    detail: str


def probe(profile: DeviceProfile, groups: Iterable[str] = (CAPABILITIES, *FAMILIES)) -> dict[str, Outcome]:
    """The outcomes of the probes of some groups for a device, by name; a name that is absent is unknown.

    Each group runs in a process of its own, beside the others, on a device that is present, once: outcomes are kept on
    disk for the same device, driver, compiler and kernel sources. ``TCPORT_PROBES=0`` leaves everything unknown.

    Args:
        groups: :data:`CAPABILITIES`, and the kernels whose self-tests are wanted; one that has none is ignored.
    """
    asked = [group for group in (CAPABILITIES, *FAMILIES) if group in set(groups)]
    index = _present(profile) if asked else None
    if index is None:
        return {}
    digest = profile.digest()
    with _lock:  # another thread that wants the same waits for it
        missing = [group for group in asked if (digest, group) not in _found]
        if missing:
            with ThreadPoolExecutor(len(missing)) as pool:
                found = pool.map(lambda group: _kept(digest, index, group), missing)
                _found.update(zip([(digest, group) for group in missing], found, strict=True))
        return {name: outcome for group in asked for name, outcome in _found[digest, group].items()}


def trusted(kernel: str, profile: DeviceProfile, tile: TileConfig | None = None) -> str | None:
    """Why a kernel must not be used on a device: a self-test of it gave wrong numbers. None: it may be.

    Where some tiles were right, the others cost the trust of tiles that are at least as large in both directions: what
    a compiler gets wrong in a tile it may get wrong in a larger one. A test that could not be run (no memory, no time,
    no compiler) is no reason: what is wrong there shows by itself.
    """
    outcomes = probe(profile, [kernel])
    wrong = {name: found for name, found in outcomes.items() if not found.ok and "wrong numbers" in found.detail}
    some_right = any(found.ok for found in outcomes.values())
    for name, found in wrong.items():
        if tile is None or not some_right or _holds(tile, name):
            return f"{name}: {found.detail}"
    return None


def run_probes(index: int, group: str, time_limit: float = TIME_LIMIT) -> tuple[dict[str, Outcome], str]:
    """Run a group's probes on a device; the outcomes, and why there are not more of them ("" when all ran)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), ENVIRONMENT_VARIABLE: "0"}
    command = [sys.executable, "-m", "tcport.probes.worker", str(index), group]
    trouble = ""
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=time_limit)
        said = done.stdout
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").splitlines()
            last = next((line for line in reversed(lines) if line.strip()), "no message")
            trouble = f"the process ended with code {done.returncode}: {last}"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        trouble = f"not done in {time_limit:.0f} s"
    except (OSError, TypeError) as error:  # no memory for a process, or no Python: where it is embedded
        said = b""
        trouble = f"no process can be started: {error}"
    outcomes = dict(filter(None, map(_answer, said.decode(errors="replace").splitlines())))
    count("probes", len(outcomes))
    return outcomes, trouble


def forget() -> None:
    """Let the next question be answered from what is kept on disk, as in another process."""
    with _lock:
        _found.clear()


_lock = process_lock()
_found: dict[tuple[str, str], dict[str, Outcome]] = {}


def _kept(digest: str, index: int, group: str) -> dict[str, Outcome]:
    versions = f"{digest} {triton_version()} {torch.__version__} {kernel_sources()} {group}"
    path = cache_folder("probes") / f"{hashlib.sha256(versions.encode()).hexdigest()}.json"
    known = _load(path)
    if known is not None:
        return known
    outcomes, trouble = run_probes(index, group)
    for name, outcome in outcomes.items():
        logger("probes").info("%s: %s (%s)", name, "ok" if outcome.ok else "not there", outcome.detail)
    if trouble:
        # Not kept: the machine may have been short of memory or time. This process does not ask again.
        logger("probes").warning("some probes of %s could not be run: %s", group, trouble)
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


def _answer(line: str) -> tuple[str, Outcome] | None:
    """The name and outcome in a line of a worker's; None for what compilers and drivers say in between."""
    answer = answer_in(line)
    if answer is None or not isinstance(name := answer.pop("name", None), str):
        return None
    outcome = _outcome(answer)
    return None if outcome is None else (name, outcome)


def _load(path: Path) -> dict[str, Outcome] | None:
    """What was kept; None where it is damaged, or written by another version: probe again."""
    found = {name: _outcome(data) for name, data in (kept(path) or {}).items()}
    return {name: outcome for name, outcome in found.items() if outcome} if found and all(found.values()) else None


def _outcome(data: Any) -> Outcome | None:
    if not isinstance(data, dict) or data.keys() != {"ok", "detail"}:
        return None
    sound = isinstance(data["ok"], bool) and isinstance(data["detail"], str)
    return Outcome(**data) if sound else None
