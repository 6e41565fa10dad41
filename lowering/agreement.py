"""Whether a lowering does what its operator does: on registration by shapes, in tests by numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tcport.device import DeviceProfile, device_profile
from tcport.device.catalog import catalogue, catalogue_profile
from tcport.errors import ArgumentError, LoweringRegistrationError, TcportError, text_of
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.foreign import ForeignCall, foreign_spec, overload_of
from tcport.lowering.registry import Row, answers_of

Samples = Callable[[], Iterable[tuple[Any, ...]]]
"""Makes sample arguments of an operator, one tuple a call."""


def check_results(row: Row, samples: Samples) -> None:
    """Refuse a lowering whose results differ from its operator's in number, shape, strides or dtype.

    Nothing is computed: operator and lowering run on meta tensors, and Triton kernels are not launched. Every device of
    the catalogue that the row is for, and this machine's CPU, is asked for candidates.

    Raises:
        LoweringRegistrationError: names the kernel, the arguments and what differs; or says that no device that the row
            is for gave a candidate.
    """
    operator = overload_of(row.op)
    seen, reasons = False, {}
    for arguments in samples():
        call = ForeignCall.of(*map(_meta, arguments))
        expected = _facts(operator(*call.args))
        with _without_values(f"Lowering {row.name} of {row.op}", call):
            candidates = list(_candidates(row, call, reasons))
        for candidate in candidates:
            seen = True
            if candidate.kernel != row.name:
                raise LoweringRegistrationError(
                    f"Lowering {row.name} of {row.op} calls its kernel {candidate.kernel}.",
                    "Give both one name: it is what reports, options and tests call it.",
                )
            with _without_values(f"Kernel {candidate.kernel} of {row.op}", call):
                actual = _facts(candidate.run(call, lambda kernel: _NotLaunched()))
            if actual != expected:
                raise LoweringRegistrationError(
                    f"Kernel {candidate.kernel} of {row.op} returns {actual} for {_facts(call.args)}, and the operator "
                    f"{expected}.",
                    "Allocate the results as the operator's fake does.",
                )
    if not seen:
        raise LoweringRegistrationError(
            f"Lowering {row.name} of {row.op} has no candidate for its own sample inputs on any device it is for"
            f"{': ' if reasons else ''}{'; '.join(reasons)}.",
            "Give inputs that it takes, or the vendor and architecture it is for.",
        )


def check_numbers(
    row: Row,
    samples: Samples,
    tolerance: tuple[float, float],
    device: torch.device | str,
    profile: DeviceProfile | None = None,
) -> int:
    """Fail unless every candidate gives the operator's numbers on a device; returns how many comparisons were made.

    Arguments that the operator writes to are compared as its results are; others must stay as they are, to the bit.

    Args:
        tolerance: relative and absolute, as ``torch.testing.assert_close`` takes them.
        profile: the device whose candidates run on ``device``, where Triton interprets kernels; None: the same one.
            Samples that hold bfloat16 are left out then, which the interpreter computes wrongly.

    Raises:
        AssertionError: says for which arguments, and what differs.
        ArgumentError: a Triton kernel would have to be compiled for the CPU.
    """
    there, compared = profile or device_profile(torch.device(device)), 0
    launch = _interpreted if torch.device(device).type == "cpu" else (lambda kernel: kernel)
    for arguments in samples():
        if profile is not None and any(tensor.dtype is torch.bfloat16 for tensor in _tensors(arguments)):
            continue
        moved = [_each(lambda tensor: tensor.to(device), argument) for argument in arguments]
        call, theirs = ForeignCall.of(*moved), _copies(moved)
        expected = overload_of(row.op)(*theirs)
        for candidate in _answers(row, call, there):
            ours = _copies(moved)
            what = f"Kernel {candidate.kernel} of {row.op} for {_facts(call.args)}"
            _compare(candidate.run(ForeignCall.of(*ours), launch), expected, tolerance, what)
            _compare_arguments(row.op, ours, theirs, tolerance, what)
            compared += 1
    return compared


def _compare(actual: Any, expected: Any, tolerance: tuple[float, float], what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=tolerance[0], atol=tolerance[1], msg=lambda text: f"{what}: {text}"
    )


def _compare_arguments(op: str, ours: list[Any], theirs: list[Any], tolerance: tuple[float, float], what: str) -> None:
    """Compare the arguments after a call, of a kernel and of the operator."""
    schema = overload_of(op)._schema.arguments
    for argument, mine, other in zip(schema, ours, theirs, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            _compare(mine, other, tolerance, f"{what}: what it wrote to {argument.name}")
        elif not all(map(torch.equal, map(_bits, _tensors(mine)), map(_bits, _tensors(other)))):
            raise AssertionError(f"{what}: it wrote to {argument.name}, which the operator does not.")


@contextlib.contextmanager
def _without_values(what: str, call: ForeignCall) -> Iterator[None]:
    try:
        yield
    except TcportError:
        raise
    except Exception as error:
        raise LoweringRegistrationError(
            f"{what} raised {type(error).__name__}: {text_of(error).rstrip('.')}, for {_facts(call.args)}.",
            "It is run when it is registered, on tensors without values: define what it uses above it, and read none.",
        ) from error


def _candidates(row: Row, call: ForeignCall, reasons: dict[str, None]) -> Iterator[Candidate]:
    for profile in (device_profile(torch.device("cpu")), *map(catalogue_profile, catalogue())):
        if row.fits(profile).ok:
            yield from _answers(row, call, profile, reasons)


def _answers(
    row: Row, call: ForeignCall, profile: DeviceProfile, reasons: dict[str, None] | None = None
) -> tuple[Candidate, ...]:
    """The candidates for a call; why there are none is added to ``reasons``, each once."""
    answer = row.lower(foreign_spec(call), profile) if row.fits(profile).ok else Verdict(False)
    if reasons is not None and isinstance(answer, Verdict):
        reasons[answer.reason] = None
    return tuple(one for one in answers_of(row, answer) if isinstance(one, Candidate))


def _meta(value: Any) -> Any:
    return _each(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), value)


def _copies(values: Iterable[Any]) -> list[Any]:
    return [_each(Tensor.clone, value) for value in values]


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """An argument with a function applied to its tensors: itself, or those of a list."""
    if isinstance(value, (list, tuple)):
        return [_each(function, item) for item in value]
    return function(value) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Tensor):
        yield value


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}"
    if isinstance(value, (tuple, list)):
        return tuple(map(_facts, value))
    return value


def _interpreted(kernel: Any) -> Any:
    """A Triton kernel that runs on CPU tensors, as it is.

    Raises:
        ArgumentError: it is one to compile, for which there is no target.
    """
    from triton import JITFunction

    inner = kernel
    while not isinstance(inner, JITFunction) and hasattr(inner, "fn"):  # triton.autotune and the like
        inner = inner.fn
    if isinstance(inner, JITFunction):
        raise ArgumentError(
            f"The Triton kernel {inner.__name__} cannot be compiled for the CPU.",
            "Set TRITON_INTERPRET=1 before Triton is imported, and it is interpreted.",
        )
    return kernel


class _NotLaunched:
    """Stands for a Triton kernel whose results nobody looks at."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None
