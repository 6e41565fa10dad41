"""CPU facts: cores this process may use, caches, instruction set."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path

import torch

from tcport.device.facts import Report, sift

OF_GPUS = (
    "pci_bus_id", "uuid", "driver_version", "warp_width", "max_threads_per_cta", "max_threads_per_unit",
    "registers_per_unit", "max_registers_per_thread", "shared_per_cta", "shared_per_cta_optin", "shared_per_unit",
    "mma_atom", "async_copy",
)  # fmt: skip
"""Facts that no CPU has."""

_SYSFS_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


def read(cpuinfo: Path = Path("/proc/cpuinfo"), caches: Path = _SYSFS_CACHE) -> Report:
    """Facts about the CPU from the operating system; nothing is measured and nothing is loaded."""
    capability = torch.backends.cpu.get_cpu_capability()
    known = sift(
        "operating system",
        {
            "arch": platform.machine() or None,
            "name": _model_name(cpuinfo) or platform.processor() or None,
            "runtime_version": torch.__version__,
            "integrated": False,
            "compute_units": _usable_cores(),
            "l2_bytes": _cache_bytes(caches, "2"),
            "memory_bytes": _memory_bytes(),
        },
        flags={name: capability.startswith(prefix) for name, prefix in _ISA.items()},
    )
    return dataclasses.replace(known, unknown={**known.unknown, **dict.fromkeys(OF_GPUS, "a CPU has none")})


_ISA = {"avx2": "AVX", "avx512": "AVX512", "vsx": "VSX", "sve": "SVE"}


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not a POSIX system: the fact stays unknown
        return None


def _cache_bytes(caches: Path, level: str) -> int | None:
    """Bytes of the data or unified cache at one level, from sysfs (``512K``)."""
    try:
        entries = sorted(caches.glob("index*"))
        for entry in entries:
            kind = (entry / "type").read_text().strip()
            if (entry / "level").read_text().strip() == level and kind in ("Data", "Unified"):
                size = (entry / "size").read_text().strip()
                return int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
    except (OSError, ValueError):  # not Linux, or a container that hides sysfs: the fact stays unknown
        return None
    return None


def _model_name(cpuinfo: Path) -> str | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
