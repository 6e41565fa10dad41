"""Asks every source about one visible device and makes one profile of the answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tcport.device import amd_source, cpu_source, intel_source, isa, nvidia_source, torch_source
from tcport.device.facts import Report, merge
from tcport.device.minimum import basic_mode
from tcport.device.profile import DeviceProfile, Vendor
from tcport.device.visible import entry_of, masks


def read_profile(device: torch.device, vendor: Vendor | None = None, **runtimes: Any) -> DeviceProfile:
    """Facts of one device, vendor runtime first, then torch's properties, then the target's instruction set.

    Args:
        device: a device with an index (the CPU needs none).
        vendor: None: what torch was built for.
        runtimes: stand-ins for the vendor's modules (``driver``, ``nvml``; ``hip``; ``loader``).
    """
    if device.type == "cpu":
        return merge("cpu", "cpu", [cpu_source.read()])
    vendor = vendor or vendor_of(device.type)
    ordinal = device.index or 0
    fallback = torch_source.read(device)
    if vendor == "nvidia":
        reports = nvidia_source.read(ordinal, **runtimes)
    elif vendor == "amd":
        reports = amd_source.read(ordinal, **runtimes)
    elif vendor == "intel":
        reports = intel_source.read(ordinal, fallback.facts.get("uuid"), **runtimes)
    else:
        reports = []
    reports = [*reports, fallback]
    arch = next((report.facts["arch"] for report in reports if "arch" in report.facts), None)
    reports.append(isa.read(arch))
    reports.append(_peak(reports, arch))
    profile = merge(vendor, device.type, reports)
    return dataclasses.replace(profile, basic_mode=basic_mode(profile), notes=_notes(vendor, ordinal))


def present_devices() -> list[torch.device]:
    """Every visible accelerator, then the CPU. Starts the runtimes that torch was built with."""
    found = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available():
            found += [torch.device(kind, index) for index in range(module.device_count())]
    return [*found, torch.device("cpu")]


def vendor_of(device_type: str) -> Vendor:
    """The vendor whose devices this build of torch calls ``device_type``."""
    if device_type == "xpu":
        return "intel"
    if device_type == "cuda":
        return "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "unknown"
    return "unknown"


def _peak(reports: list[Report], arch: str | None) -> Report:
    """Peak of the matrix units from the visible device's own units and clock."""
    source = "matrix rate of the target x units x clock"
    rate = isa.matrix_rate(arch)
    if rate is None:
        return Report(source, unknown={"matrix_flops": f"{arch or 'the target'} alone does not decide the matrix rate"})
    known = {name: value for report in reversed(reports) for name, value in report.facts.items()}
    if "compute_units" not in known or "clock_hz" not in known:
        return Report(source, unknown={"matrix_flops": "units or clock are unknown"})
    return Report(source, {"matrix_flops": float(rate * known["compute_units"] * known["clock_hz"])})


def _notes(vendor: Vendor, ordinal: int) -> tuple[str, ...]:
    notes = [str(mask) for mask in masks(vendor)]
    entry = entry_of(vendor, ordinal)
    if entry is not None:
        notes.append(f"visible device {ordinal} is entry {entry} of the mask")
    override = amd_source.override_note() if vendor == "amd" else None
    return (*notes, override) if override else tuple(notes)
