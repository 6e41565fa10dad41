"""What the environment's device masks say, in every spelling their runtimes accept.

Facts never come from here: the runtime has applied the mask already, and the visible device is the truth. This module
says, for a report, which entry of a mask a visible device is and why a device cannot be seen.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

MASKS = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "intel": ("ZE_AFFINITY_MASK",),
}
"""The variables of each vendor, in the order in which they are applied: each counts what the one before it left."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """One mask, taken apart.

    Attributes:
        entries: what it selects, in order: indices, UUIDs or UUID prefixes, MIG or tile names.
        remark: why part of the text selects nothing; empty when all of it counts.
    """

    variable: str
    text: str
    entries: tuple[str, ...]
    remark: str = ""

    def __str__(self) -> str:
        tail = f" ({self.remark})" if self.remark else ""
        return f"{self.variable}={self.text!r} selects {', '.join(self.entries) or 'no device'}{tail}"


def masks(vendor: str, environ: Mapping[str, str] | None = None) -> tuple[Mask, ...]:
    """The masks that are set for a vendor, in the order in which they are applied."""
    environ = os.environ if environ is None else environ
    return tuple(parse_mask(name, environ[name]) for name in MASKS.get(vendor, ()) if name in environ)


def parse_mask(variable: str, text: str) -> Mask:
    """Takes a mask apart the way its runtime does; any string is accepted.

    The first entry that is no device (a negative or missing number, a word) ends the list. An index given twice makes
    the whole mask select nothing. Entries of one mask are of one kind: the first decides.
    """
    entries: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        entry = _entry(part, tiles=variable == "ZE_AFFINITY_MASK")
        if entry is None:
            return Mask(variable, text, tuple(entries), f"{part!r} is no device and ends the list")
        if entries and entry[0].isdigit() != entries[0][0].isdigit():
            return Mask(variable, text, tuple(entries), f"{part!r} is of another kind than {entries[0]!r}")
        if entry in entries:
            return Mask(variable, text, (), f"{part!r} is given twice, which hides every device")
        entries.append(entry)
    return Mask(variable, text, tuple(entries))


def entry_of(vendor: str, ordinal: int, environ: Mapping[str, str] | None = None) -> str | None:
    """The mask entry that visible device ``ordinal`` is; None when no mask is set or it selects fewer devices."""
    applied = masks(vendor, environ)
    if not applied or ordinal >= len(applied[-1].entries):
        return None
    return applied[-1].entries[ordinal]


def why_hidden(vendor: str, ordinal: int, environ: Mapping[str, str] | None = None) -> str:
    """One clause on why the runtime may not see device ``ordinal``; empty when no mask explains it."""
    short = [mask for mask in masks(vendor, environ) if ordinal >= len(mask.entries)]
    return "; ".join(str(mask) for mask in short)


_UUID = re.compile(r"(GPU|MIG)-[0-9a-fA-F-]+$|MIG-GPU-[0-9a-fA-F-]+/\d+/\d+$")
_INDEX = re.compile(r"\+?\d+")
_TILE = re.compile(r"\d+(\.\d+){0,2}$")


def _entry(part: str, *, tiles: bool) -> str | None:
    if tiles:
        return part if _TILE.match(part) else None
    if _UUID.match(part):
        return part
    # CUDA reads the leading digits and ignores what follows, as C's strtoul does.
    index = _INDEX.match(part)
    return str(int(index[0])) if index else None
