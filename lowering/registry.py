"""Lowerings by operator: functions from (spec, profile) to candidates, registered by decorator."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any

from tcport.device import DeviceProfile
from tcport.errors import NoCandidateError, OptionError
from tcport.fingerprint import source_identity
from tcport.lowering.candidate import TIERS, Candidate, Rejection, Selection, Verdict

Answer = Candidate | Iterable[Candidate] | Verdict
LowerFn = Callable[[Any, DeviceProfile], Answer]


@dataclasses.dataclass(frozen=True)
class Row:
    """One registered lowering and the devices it is for."""

    op: str
    name: str
    lower: LowerFn
    vendor: str | None
    arch: str | None
    flags: tuple[str, ...]
    priority: int

    def fits(self, profile: DeviceProfile) -> Verdict:
        """Whether the device is one of this row's. The vendor is decided before any capability is looked at."""
        if self.vendor is not None and profile.vendor != self.vendor:
            return Verdict.no(f"made for vendor {self.vendor}, the device is {profile.vendor}")
        if self.arch is not None and not fnmatch.fnmatchcase(profile.arch or "", self.arch):
            return Verdict.no(f"made for architectures {self.arch}, the device is {profile.arch or 'of unknown arch'}")
        missing = [flag for flag in self.flags if not profile.flags.get(flag)]
        if missing:
            return Verdict.no(f"the device lacks {', '.join(missing)}")
        return Verdict(True)

    def identity(self) -> str:
        """What the cache key knows of the row."""
        return _identity(self)


@functools.lru_cache(maxsize=256)
def _identity(row: Row) -> str:
    where = (row.op, row.name, row.vendor, row.arch, row.flags, row.priority)
    return f"{where} {source_identity(row.lower)}"


_ROWS: list[Row] = []
_generation = 0


def register_lowering(
    op: str,
    *,
    name: str | None = None,
    vendor: str | None = None,
    arch: str | None = None,
    flags: tuple[str, ...] = (),
    priority: int = 0,
) -> Callable[[LowerFn], LowerFn]:
    """Register a lowering of an operator.

    Args:
        op: the operator's name within its namespace, such as ``"paged_attention"``.
        name: how options and reports call the kernel; default: the function's name.
        vendor: ``"nvidia"``, ``"amd"``, ``"intel"`` or ``"cpu"``; None: any.
        arch: a pattern such as ``"sm_9*"`` or ``"gfx94*"``; None: any.
        flags: capability flags the device must have.
        priority: within one tier, the higher is tried first.

    The decorated function takes ``(spec, profile)`` and returns a :class:`Candidate`, several of them in the order of
    preference, or a :class:`Verdict` that says why it has none.
    """

    def register(lower: LowerFn) -> LowerFn:
        global _generation
        _generation += 1
        row = Row(op, name or lower.__name__, lower, vendor, arch, flags, priority)
        _ROWS[:] = [r for r in _ROWS if (r.op, r.name) != (row.op, row.name)] + [row]
        return lower

    return register


def unregister_lowering(op: str, name: str) -> None:
    """Forget a registered lowering; unknown names are ignored."""
    global _generation
    _generation += 1
    _ROWS[:] = [row for row in _ROWS if (row.op, row.name) != (op, name)]


def generation() -> int:
    """A number that changes with every registration: what was chosen under another one may be out of date."""
    return _generation


def rows(op: str) -> tuple[Row, ...]:
    """The registered lowerings of an operator."""
    return tuple(row for row in _ROWS if row.op == op)


def select(op: str, spec: Any, profile: DeviceProfile, *, kernel: str | None = None) -> Selection:
    """The chain of candidates for one node, best first.

    Args:
        op: the operator's name.
        spec: the node's spec, :class:`tcport.ir.AttentionSpec` for attention.
        profile: the device the node's tensors lie on.
        kernel: take this kernel and no other.

    Raises:
        OptionError: no kernel has that name.
        NoCandidateError: the named kernel refuses the node.
    """
    known = {row.name for row in _ROWS}
    if kernel is not None and kernel not in known:
        close = difflib.get_close_matches(kernel, known, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"Known kernels: {', '.join(sorted(known))}."
        raise OptionError(f"There is no kernel named {kernel!r}.", hint)
    if kernel is not None and kernel not in {row.name for row in rows(op)}:
        kernel = None  # the name belongs to another operator of the same graph

    candidates: list[tuple[int, int, Candidate]] = []
    rejections: list[Rejection] = []
    for row in rows(op):
        if kernel is not None and row.name != kernel:
            rejections.append(Rejection(row.name, f"options ask for the kernel {kernel}"))
            continue
        verdict = row.fits(profile)
        answer: Answer = row.lower(spec, profile) if verdict.ok else verdict
        if isinstance(answer, Verdict):
            rejections.append(Rejection(row.name, answer.reason))
            continue
        answers = (answer,) if isinstance(answer, Candidate) else tuple(answer)
        stamped = [dataclasses.replace(c, source=row.identity()) for c in answers]
        candidates += [(TIERS.index(c.tier), -row.priority, c) for c in stamped]
    candidates.sort(key=lambda entry: entry[:2])
    if not candidates:
        reasons = "; ".join(map(str, rejections)) or "no lowering is registered"
        raise NoCandidateError(
            f"No kernel takes this {op} node: {reasons}.", "Drop the option 'kernel', or change what it refuses."
        )
    return Selection(tuple(c for _, _, c in candidates), tuple(rejections))
