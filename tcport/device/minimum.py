"""The oldest driver and runtime that hardware-specific kernels are used on; below them a device is in basic mode."""

from __future__ import annotations

import re

from tcport.device.profile import DeviceProfile

_MINIMUM = {
    # CUDA 12 is the oldest major version torch 2.11 is built for, and its minor releases run on any driver of it.
    "nvidia": ("CUDA driver", "runtime_version", (12, 0)),
    # Triton's AMD backend and torch 2.11 are built against ROCm 6.2 and later.
    "amd": ("HIP runtime", "runtime_version", (6, 2)),
    # Level Zero 1.3 has every query that the facts are read with, the PCI extension included.
    "intel": ("Level Zero driver", "runtime_version", (1, 3)),
}


def basic_mode(profile: DeviceProfile) -> str | None:
    """The reason for basic mode, or None. An unknown version is no reason."""
    what, fact, minimum = _MINIMUM.get(profile.vendor, ("", "", ()))
    text = getattr(profile, fact) if fact else None
    if text is None or not profile.source.get(fact, "").startswith(what.split()[0]):
        return None
    version = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
    if version >= minimum:
        return None
    wanted = ".".join(map(str, minimum))
    return f"The {what} reports version {text}; hardware-specific kernels need {wanted} or newer: update the driver."
