"""The limits a tile must keep, taken from a device profile; what is unknown is assumed at its smallest, and said."""

from __future__ import annotations

import dataclasses

from tcport.device.profile import DeviceProfile

# Every GPU that tcport compiles for has at least this much: CUDA's default per block, the smallest maximal CTA and
# register window of the supported targets. One compute unit is the smallest device there is.
_SMALLEST = {
    "shared_per_cta_optin": 48 * 1024,
    "max_threads_per_cta": 256,
    "max_registers_per_thread": 255,
    "compute_units": 1,
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one CTA and of one compute unit.

    Attributes:
        assumed: one sentence for each value that no source reported.
    """

    shared_per_cta: int
    shared_per_unit: int
    threads_per_cta: int
    threads_per_unit: int
    registers_per_thread: int
    registers_per_unit: int
    warp_width: int
    compute_units: int
    assumed: tuple[str, ...]


def limits_of(profile: DeviceProfile) -> Limits:
    """Reads the limits out of a profile, smallest safe value where a fact is unknown."""
    assumed: list[str] = []

    def fact(name: str, fallback: int) -> int:
        value = getattr(profile, name)
        if value is None:
            assumed.append(f"{name} is unknown ({profile.unknown[name]}); assumed {fallback}")
            return fallback
        return value

    # The opt-in limit is at least the default one, so the default stands in for it before any assumption does.
    optin = profile.shared_per_cta_optin or profile.shared_per_cta
    shared = optin if optin is not None else fact("shared_per_cta_optin", _SMALLEST["shared_per_cta_optin"])
    threads = fact("max_threads_per_cta", _SMALLEST["max_threads_per_cta"])
    return Limits(
        shared_per_cta=shared,
        shared_per_unit=max(fact("shared_per_unit", shared), shared),
        threads_per_cta=threads,
        threads_per_unit=max(fact("max_threads_per_unit", threads), threads),
        registers_per_thread=fact("max_registers_per_thread", _SMALLEST["max_registers_per_thread"]),
        registers_per_unit=fact("registers_per_unit", 65536),
        warp_width=fact("warp_width", 64 if profile.vendor == "amd" else 32),
        compute_units=fact("compute_units", _SMALLEST["compute_units"]),
        assumed=tuple(assumed),
    )
