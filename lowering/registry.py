"""Lowerings by operator: functions from (spec, profile) to candidates, registered by decorator."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from tcport.device import DeviceProfile
from tcport.errors import LoweringRegistrationError, NoCandidateError, OptionError, text_of
from tcport.fingerprint import source_identity
from tcport.logs import logger
from tcport.lowering.candidate import TIERS, Candidate, Rejection, Selection, Verdict
from tcport.probes import CAPABILITIES, probe

Answer = Candidate | Iterable[Candidate | Rejection] | Verdict
LowerFn = Callable[[Any, DeviceProfile], Answer]
Kernels = str | tuple[str, ...] | None
"""The names of the only kernels to consider; None: all of them."""


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
    state: Callable[[], str] | None = None
    inputs: Callable[[], Iterable[tuple[Any, ...]]] | None = None
    tolerance: tuple[float, float] = (1e-2, 1e-2)

    def fits(self, profile: DeviceProfile) -> Verdict:
        """Whether the device is one of this row's. The vendor is decided before any capability is looked at."""
        if self.vendor is not None and profile.vendor != self.vendor:
            return Verdict.no(f"made for vendor {self.vendor}, the device is {profile.vendor}")
        if self.arch is not None and not fnmatch.fnmatchcase(profile.arch or "", self.arch):
            return Verdict.no(f"made for architectures {self.arch}, the device is {profile.arch or 'of unknown arch'}")
        if profile.basic_mode and (self.arch is not None or self.flags):
            return Verdict.no(f"hardware-specific, and the device is in basic mode: {profile.basic_mode}")
        measured = probe(profile, [CAPABILITIES]) if self.flags else {}
        missing = [flag for flag in self.flags if not (measured[flag].ok if flag in measured else profile.has(flag))]
        if missing:
            return Verdict.no(f"the device lacks {', '.join(missing)}")
        return Verdict(True)

    def place(self) -> tuple[Any, ...]:
        """What another row must share to replace this one."""
        return (self.op, self.name, self.vendor, self.arch, self.flags)

    def specific(self) -> tuple[bool, bool, int]:
        """Among rows of one kernel that fit a device, the largest answers."""
        return (self.arch is not None, self.vendor is not None, len(self.flags))

    def identity(self) -> str:
        """What the cache key knows of the row."""
        return _identity(self)

    def state_for(self, vendors: Collection[str]) -> str:
        """What the row's answer depends on outside of sources and device, if it is for a device of these vendors."""
        if self.state is None or self.vendor not in vendors:
            return ""
        try:
            return self.state()
        except Exception as error:  # noqa: BLE001  (a row that is broken costs its kernel alone; see _answers)
            said = f"its state cannot be had: {type(error).__name__}: {text_of(error)}"
            _warn_of_row(self.op, self.name, said)
            return said


@functools.lru_cache(maxsize=256)
def _identity(row: Row) -> str:
    where = (row.op, row.name, row.vendor, row.arch, row.flags, row.priority)
    return f"{where} {source_identity(row.lower)}"


VENDORS = ("nvidia", "amd", "intel", "cpu")

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
    state: Callable[[], str] | None = None,
    inputs: Callable[[], Iterable[tuple[Any, ...]]] | None = None,
    tolerance: tuple[float, float] = (1e-2, 1e-2),
) -> Callable[[LowerFn], LowerFn]:
    """Register a lowering of an operator.

    A kernel may have several rows, for different devices; the most specific one that fits a device answers. A row for
    the same kernel and the same devices replaces the earlier one.

    Args:
        op: the operator's name within ``tcport``, such as ``"paged_attention"``, or ``"namespace::name"`` for an
            operator of another library. Behind the last lowering of such an operator stands the operator itself.
        name: how options and reports call the kernel; default: the function's name.
        vendor: ``"nvidia"``, ``"amd"``, ``"intel"`` or ``"cpu"``; None: any.
        arch: a pattern such as ``"sm_9*"`` or ``"gfx94*"``; None: any.
        flags: capability flags the device must have: as measured (:data:`tcport.probes.capabilities.CAPABILITIES`),
            or else as its profile says.
        priority: within one tier, the higher is tried first.
        state: names what the answer depends on besides the device, such as a library that this machine's compiler has
            built. It is part of the cache key, and called before a cached graph that may use the row is run: what such
            a graph calls must then be loaded.
        inputs: for an operator of another library: makes sample arguments, one tuple a call. On registration they show
            that the lowering's results have the shapes, strides and dtypes of the operator's;
            :func:`tcport.testing.check_lowering` compares the numbers.
        tolerance: relative and absolute, for that comparison.

    The decorated function takes ``(spec, profile)`` and returns a :class:`Candidate`, several of them in the order of
    preference, with any :class:`Rejection` of a tile among them, or a :class:`Verdict` that says why it has none. For
    an operator of another library the spec is a :class:`tcport.lowering.foreign.ForeignSpec`, and the candidate's
    ``run`` is given a ``ForeignCall``.

    Raises:
        LoweringRegistrationError: there is no such operator, or the lowering does not agree with it.
    """

    if vendor not in (None, *VENDORS):
        raise LoweringRegistrationError(
            f"A lowering of {op} is for the vendor {vendor!r}.", f"Give one of {', '.join(map(repr, VENDORS))}."
        )
    _require_words(op, {"name": name, "arch": arch}, flags)
    if type(priority) is not int:
        raise LoweringRegistrationError(f"A lowering of {op} has the priority {priority!r}.", "Give a whole number.")
    if inputs is not None and not callable(inputs):
        raise LoweringRegistrationError(
            f"A lowering of {op} has inputs of type {type(inputs).__name__}.",
            "Give a function that makes tuples of sample arguments.",
        )

    from tcport.lowering.agreement import check_results
    from tcport.lowering.foreign import overload_of

    overload_of(op)

    def register(lower: LowerFn) -> LowerFn:
        global _generation
        _generation += 1
        row = Row(op, name or lower.__name__, lower, vendor, arch, flags, priority, state, inputs, tolerance)
        if "::" in op and row.inputs is not None:
            check_results(row, row.inputs)
        _ROWS[:] = [r for r in _ROWS if r.place() != row.place()] + [row]
        return lower

    return register


def _require_words(op: object, given: dict[str, Any], flags: Any) -> None:
    """What is compared for each call must be comparable: a broken row would cost every kernel, not its own alone.

    Raises:
        LoweringRegistrationError: an argument is no text, or the flags are no tuple of texts.
    """
    for argument, value in given.items():
        if value is not None and not isinstance(value, str):
            raise LoweringRegistrationError(f"A lowering of {op} has the {argument} {value!r}.", "Give a str.")
    if not isinstance(flags, tuple) or not all(isinstance(flag, str) for flag in flags):
        raise LoweringRegistrationError(
            f"A lowering of {op} has the flags {flags!r}.", "Give a tuple of str, such as ('fp8_e4m3_dot',)."
        )


def unregister_lowering(op: str, name: str) -> None:
    """Forget every row of a kernel; unknown names are ignored."""
    global _generation
    _generation += 1
    _ROWS[:] = [row for row in _ROWS if (row.op, row.name) != (op, name)]


def registered_operators() -> tuple[str, ...]:
    """The names of the operators that have lowerings, each once."""
    return tuple(dict.fromkeys(row.op for row in _ROWS))


def all_rows() -> tuple[Row, ...]:
    """Every registered lowering."""
    return tuple(_ROWS)


@contextlib.contextmanager
def replaced(row: Row, other: Row) -> Iterator[None]:
    """Another row in the place of one, for the length of a ``with`` block."""
    place = _ROWS.index(row)
    _ROWS[place] = other
    touch()
    try:
        yield
    finally:
        _ROWS[_ROWS.index(other)] = row
        touch()


def touch() -> None:
    """Say that lowerings may answer otherwise than before, though their rows are the same."""
    global _generation
    _generation += 1


def generation() -> int:
    """A number that changes with every registration: what was chosen under another one may be out of date."""
    return _generation


def rows(op: str) -> tuple[Row, ...]:
    """The registered lowerings of an operator."""
    return tuple(row for row in tuple(_ROWS) if row.op == op)  # another thread may register one


def select(op: str, spec: Any, profile: DeviceProfile, *, kernel: Kernels = None) -> Selection:
    """The chain of candidates for one node, best first.

    Args:
        op: the operator's name.
        spec: the node's spec, :class:`tcport.ir.AttentionSpec` for attention.
        profile: the device the node's tensors lie on.
        kernel: take these kernels and no others. Names of other operators' kernels are ignored: a graph may hold both.

    Raises:
        OptionError: no kernel has such a name.
        NoCandidateError: every kernel that was named refuses the node.
    """
    asked = named(op, kernel)
    candidates: list[tuple[int, int, Candidate]] = []
    rejections: list[Rejection] = []
    for name, group in _by_kernel(rows(op)).items():
        if asked and name not in asked:
            rejections.append(Rejection(name, f"options ask for the kernel {' or '.join(asked)}"))
            continue
        row, answers = _answers(group, spec, profile)
        rejections += [answer for answer in answers if isinstance(answer, Rejection)]
        stamped = [dataclasses.replace(c, source=row.identity()) for c in answers if isinstance(c, Candidate)]
        candidates += [(TIERS.index(c.tier), -row.priority, c) for c in stamped]
    candidates.sort(key=lambda entry: entry[:2])
    if not candidates:
        told = [rejection for rejection in rejections if not asked or rejection.kernel in asked]
        reasons = "; ".join(map(str, told)) or "no lowering is registered"
        raise NoCandidateError(
            f"No kernel takes this {op} node: {reasons}.", "Drop the option 'kernel', or change what it refuses."
        )
    return Selection(tuple(c for _, _, c in candidates), tuple(rejections))


def answers_of(row: Row, answer: Answer) -> tuple[Candidate | Rejection, ...]:
    """The candidates and rejections in an answer of a row; none in a verdict.

    Raises:
        LoweringRegistrationError: the answer is something else.
    """
    if isinstance(answer, Verdict):
        return ()
    given = (answer,) if isinstance(answer, Candidate) or not isinstance(answer, Iterable) else tuple(answer)
    for one in given:
        if not isinstance(one, (Candidate, Rejection)) or (isinstance(one, Candidate) and one.tier not in TIERS):
            raise LoweringRegistrationError(
                f"Lowering {row.name} of {row.op} answered {one!r}.",
                f"Return a Candidate of a tier among {', '.join(TIERS)}, several of them, or Verdict.no(reason).",
            )
        if isinstance(one, Candidate) and (why := one.misfit()) is not None:
            raise LoweringRegistrationError(
                f"Lowering {row.name} of {row.op} answered a Candidate that is none: {why}.",
                "Look up its attributes at tcport.lowering.candidate.Candidate.",
            )
        try:
            hash(one)
        except TypeError as error:
            raise LoweringRegistrationError(
                f"Lowering {row.name} of {row.op} answered {one!r}, which has no hash: {error}.",
                "Build config and options of tuples and frozen dataclasses.",
            ) from error
    return given


def named(op: str, kernel: Kernels) -> tuple[str, ...]:
    """Those of the kernels asked for that are kernels of an operator.

    Raises:
        OptionError: no operator has a kernel of such a name.
    """
    asked = () if kernel is None else (kernel,) if isinstance(kernel, str) else kernel
    known = {row.name for row in _ROWS}
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {' or '.join(close)}?" if close else f"Known kernels: {', '.join(sorted(known))}."
            raise OptionError(f"There is no kernel named {name!r}.", hint)
    own = {row.name for row in rows(op)}
    return tuple(name for name in asked if name in own)


def _by_kernel(registered: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in registered:
        groups.setdefault(row.name, []).append(row)
    return groups


def _answers(group: list[Row], spec: Any, profile: DeviceProfile) -> tuple[Row, tuple[Candidate | Rejection, ...]]:
    """What the most specific row of a kernel that fits the device answers, or why none of them fits."""
    verdicts = {row: row.fits(profile) for row in group}
    fitting = [row for row in group if verdicts[row].ok]
    if not fitting:
        near = [row for row in group if row.vendor in (None, profile.vendor)] or group
        return near[0], (Rejection(near[0].name, "; ".join(dict.fromkeys(verdicts[row].reason for row in near))),)
    row = max(fitting, key=Row.specific)
    try:
        return row, _understood(row, row.lower(spec, profile))
    except Exception as error:  # noqa: BLE001  (anyone may register a row: one that is broken costs its kernel alone)
        said = f"its lowering failed: {type(error).__name__}: {text_of(error)}{_hint(error)}"
        _warn_of_row(row.op, row.name, said)
        return row, (Rejection(row.name, said),)


def _understood(row: Row, answer: Answer) -> tuple[Candidate | Rejection, ...]:
    """What a lowering answered, a verdict as a rejection; there is always something.

    Raises:
        LoweringRegistrationError: see :func:`answers_of`.
    """
    if isinstance(answer, Verdict):
        return (Rejection(row.name, answer.reason or "it gives no reason"),)
    return answers_of(row, answer) or (Rejection(row.name, "it gave no candidate and no reason"),)


def _hint(error: Exception) -> str:
    """What to do about the one error that shows with open sizes alone, when samples and tests have gone well."""
    return "; a size that is open is no number, ask isinstance(size, int)" if "Relational" in text_of(error) else ""


@functools.lru_cache(maxsize=256)
def _warn_of_row(op: str, name: str, said: str) -> None:
    """Say it once: every node and every call asks again."""
    logger("chain").warning("%s of %s: %s", name, op, said)
