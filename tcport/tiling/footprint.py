"""What compiled kernels really take: compiled out of process for any target, read back, kept on disk.

The compiler itself never checks a device's limits: a kernel that asks for more shared memory than the device has
compiles, and fails at its first launch. Here it fails at plan time, with the numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcport.device.profile import DeviceProfile
from tcport.fingerprint import triton_version
from tcport.ir import AttentionSpec, TileConfig
from tcport.tiling.limits import limits_of
from tcport.tiling.sources import sources_of
from tcport.tiling.wire import config_data, spec_data
from tcport.tiling.workers import answers
from tcport.user_cache import cache_folder, keep, kept

ENTRIES = {
    "decode": "tcport.kernels.triton_decode:paged_decode",
    "prefill": "tcport.kernels.triton_prefill:paged_prefill",
    "hopper_prefill": "tcport.kernels.hopper_prefill:hopper_prefill",
}
"""Kernel name of a ranking -> where its entry function lies."""

# What says nothing about the kernel, and is asked again: a process that died may have been out of memory, an absent
# tool may be installed, a full disk emptied.
_PASSING = re.compile(r"the compiler|Cannot find|^(FileNotFound|Permission|Memory|OS|Import|ModuleNotFound)Error")


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one compiled kernel takes.

    Attributes:
        shared: bytes of shared memory of one CTA, the compiler's scratch included.
        registers: 32-bit vector registers of one thread.
        spill: bytes of one thread's registers that went to memory.
        threads: threads of one CTA.
    """

    kernel: str
    shared: int
    registers: int
    spill: int
    threads: int

    def over_limit(self, profile: DeviceProfile) -> str | None:
        """The first limit of the device that this kernel exceeds, with both numbers; None when it fits."""
        limits = limits_of(profile)
        pairs = (
            ("bytes of shared memory", self.shared, limits.shared_per_cta),
            ("threads", self.threads, limits.threads_per_cta),
            ("registers of a CTA", self.registers * self.threads, limits.registers_per_unit),
        )
        for what, used, limit in pairs:
            if used > limit:
                return f"{self.kernel} needs {used} {what}; the device has {limit}"
        return None

    def __str__(self) -> str:
        spill = f", {self.spill} bytes spilled" if self.spill else ""
        return f"{self.kernel}: {self.shared} bytes shared, {self.registers} registers x {self.threads} threads{spill}"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The footprints of everything one call launches, or why there are none."""

    footprints: tuple[Footprint, ...] = ()
    error: str | None = None

    @property
    def spill(self) -> int:
        return max((footprint.spill for footprint in self.footprints), default=0)

    def over_limit(self, profile: DeviceProfile) -> str | None:
        reasons = (footprint.over_limit(profile) for footprint in self.footprints)
        return next((reason for reason in reasons if reason), None)


def compile_target(profile: DeviceProfile) -> tuple[str, int | str, int] | None:
    """Triton's backend, architecture and warp width for a device; None where this Triton has no compiler for it."""
    arch = profile.arch or ""
    if profile.vendor == "nvidia" and (match := re.fullmatch(r"sm_(\d+)[af]?", arch)):
        return ("cuda", int(match[1]), 32)
    if profile.vendor == "amd" and arch.startswith("gfx"):
        return ("hip", arch, profile.warp_width or (64 if arch.startswith("gfx9") else 32))
    return None


def measure(
    spec: AttentionSpec,
    configs: Sequence[TileConfig],
    profile: DeviceProfile,
    entry: str | None = None,
    cache: Path | None = None,
) -> list[Compiled]:
    """Compiles a kernel for a device's target with each tile and reads back what it takes.

    Args:
        entry: ``module:function`` of the kernel entry; None: the spec's own.
        cache: folder for results; None: the user's.

    Returns:
        One result per tile. A tile that does not compile, or aborts the compiler, has an ``error``.
    """
    target = compile_target(profile)
    if target is None:
        return [Compiled(error=f"no compiler for {profile.vendor} {profile.arch}")] * len(configs)
    entry = entry or ENTRIES["decode" if spec.form == "decode" else "prefill"]
    shared = {"entry": entry, "spec": spec_data(spec), "target": list(target)}
    requests = [shared | {"config": config_data(config)} for config in configs]
    folder = cache or cache_folder("footprints")
    paths = [folder / f"{_key(request)}.json" for request in requests]
    found: dict[Path, Compiled] = {path: known for path in paths if (known := _known(path)) is not None}
    missing = {path: request for path, request in zip(paths, requests, strict=True) if path not in found}
    for path, answer in zip(missing, answers(list(missing.values())), strict=True):
        found[path] = _compiled(answer)
        if not _PASSING.search(answer.get("error", "")):
            keep(path, answer)
    return [found[path] for path in paths]


def _key(request: dict[str, Any]) -> str:
    versions = [triton_version(), sources_of(request["entry"].split(":")[0])]
    return hashlib.sha256(json.dumps([request, versions], sort_keys=True).encode()).hexdigest()


def _known(path: Path) -> Compiled | None:
    """What was kept of an earlier compile; None where nothing was, or it is damaged and is asked again."""
    answer = kept(path)
    try:
        known = None if answer is None else _compiled(answer)
    except (KeyError, TypeError):
        return None
    numbers = [n for f in known.footprints for n in (f.shared, f.registers, f.spill, f.threads)] if known else []
    return known if all(type(number) is int for number in numbers) else None


def _compiled(answer: dict[str, Any]) -> Compiled:
    if "error" in answer:
        return Compiled(error=str(answer["error"]))
    return Compiled(tuple(Footprint(**launch) for launch in answer["launches"]))
