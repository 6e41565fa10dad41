"""What one source reports about a device, and how several reports become one profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tcport.device.profile import FACTS, DeviceProfile, Vendor


@dataclasses.dataclass(frozen=True)
class Report:
    """The answer of one source.

    Attributes:
        source: who answered, with its version where it has one.
        facts: fact name -> value; only known values.
        unknown: fact name -> why this source cannot tell; ``"*"`` stands for every fact.
        flags: capabilities this source knows about.
    """

    source: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unknown: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, bool] = dataclasses.field(default_factory=dict)


class SourceError(Exception):
    """A source cannot answer at all; the text is the reason every one of its facts is unknown. Never leaves L0."""


def merge(vendor: Vendor, device_type: str, reports: Sequence[Report]) -> DeviceProfile:
    """One profile out of reports in order of trust: the first source that knows a fact wins.

    A fact nobody knows keeps every source's reason.
    """
    facts: dict[str, Any] = {}
    source: dict[str, str] = {}
    unknown: dict[str, str] = {}
    flags: dict[str, bool] = {}
    for report in reports:
        for name, value in report.facts.items():
            if name not in facts:
                facts[name], source[name] = value, report.source
        for flag, value in report.flags.items():
            flags.setdefault(flag, value)
    for name in set(FACTS) - facts.keys():
        reasons = [(r.source, r.unknown.get(name) or r.unknown.get("*")) for r in reports]
        unknown[name] = "; ".join(f"{who}: {why}" for who, why in reasons if why)
    return DeviceProfile(vendor=vendor, device_type=device_type, flags=flags, unknown=unknown, source=source, **facts)


def sift(source: str, values: Mapping[str, Any], flags: Mapping[str, bool] | None = None) -> Report:
    """A report from raw values in which a zero, a negative number, an empty string and None all mean unknown."""
    facts, unknown = {}, {}
    for name, value in values.items():
        if value is None:
            unknown[name] = "not reported"
        elif (
            isinstance(value, bool) or (isinstance(value, str) and value) or (not isinstance(value, str) and value > 0)
        ):
            facts[name] = value
        else:
            unknown[name] = f"reported as {value!r}"
    return Report(source, facts, unknown, dict(flags or {}))
