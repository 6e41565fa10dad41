"""Intel facts: Level Zero for the visible device; torch.xpu stands behind it."""

from __future__ import annotations

import uuid
from typing import Any

from tcport.device import level_zero
from tcport.device.facts import Report, SourceError, sift
from tcport.device.visible import why_hidden

# Graphics IP version (architecture, release) -> Triton's name of the target. Source: Intel's device IP version
# numbers, as the compute runtime and the open compiler list them.
_TARGETS = {
    (12, 55): "dg2",
    (12, 56): "dg2",
    (12, 57): "dg2",
    (12, 60): "pvc",
    (20, 1): "bmg",
    (20, 2): "bmg",
    (20, 4): "lnl",
}


def read(ordinal: int, device_uuid: str | None = None, loader: Any = None) -> list[Report]:
    """Level Zero's report on one visible GPU.

    Args:
        ordinal: index as torch counts devices; used when no UUID is known.
        device_uuid: the UUID torch gives; SYCL and Level Zero may count in different orders.
        loader: the ``libze_loader`` library or a stand-in; None loads it.
    """
    try:
        return [_from_level_zero(ordinal, device_uuid, loader or level_zero.load())]
    except SourceError as error:
        return [Report("Level Zero", unknown={"*": str(error)})]


def _from_level_zero(ordinal: int, device_uuid: str | None, loader: Any) -> Report:
    gpus = level_zero.gpus(loader)
    by_uuid = [gpu for gpu in gpus if _uuid(gpu) == device_uuid]
    if not by_uuid and ordinal >= len(gpus):
        hidden = why_hidden("intel", ordinal)
        raise SourceError(f"{len(gpus)} GPUs are visible" + (f"; {hidden}" if hidden else ""))
    gpu = by_uuid[0] if by_uuid else gpus[ordinal]
    p, compute = gpu.properties, gpu.compute
    widths = sorted(compute.subGroupSizes[: compute.numSubGroupSizes])
    values = {
        "arch": _target(gpu.ip_version),
        "name": p.name.decode(errors="replace"),
        "uuid": _uuid(gpu),
        "pci_bus_id": _pci(gpu.pci),
        "driver_version": str(gpu.driver_version),
        "runtime_version": f"{gpu.api_version >> 16}.{gpu.api_version & 0xFFFF}",
        "integrated": bool(p.flags & level_zero.INTEGRATED),
        "compute_units": p.numSlices * p.numSubslicesPerSlice,
        "warp_width": 16 if 16 in widths else next(iter(widths), None),
        "max_threads_per_cta": compute.maxTotalGroupSize,
        "max_threads_per_unit": p.numEUsPerSubslice * p.numThreadsPerEU * p.physicalEUSimdWidth,
        "shared_per_cta": compute.maxSharedLocalMemory,
        "shared_per_cta_optin": compute.maxSharedLocalMemory,
        "l2_bytes": max((cache.cacheSize for cache in gpu.caches), default=None),
        "memory_bytes": sum(memory.totalSize for memory in gpu.memories),
        "clock_hz": p.coreClockRate * 1e6,
    }
    report = sift("Level Zero", values)
    unknown = {**report.unknown, "memory_bandwidth": "Level Zero gives a memory clock, not the transfers per clock"}
    return Report(report.source, report.facts, unknown, report.flags)


def _target(ip_version: int | None) -> str | None:
    """Architecture in bits 31..22, release in bits 21..14 of the device IP version."""
    if ip_version is None:
        return None
    number = (ip_version >> 22, ip_version >> 14 & 0xFF)
    return _TARGETS.get(number, f"xe-{number[0]}.{number[1]}")


def _uuid(gpu: level_zero.Device) -> str:
    return str(uuid.UUID(bytes=bytes(gpu.properties.uuid)))


def _pci(pci: level_zero.Pci | None) -> str | None:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.{pci.function:x}" if pci is not None else None
