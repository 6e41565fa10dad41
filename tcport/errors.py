"""Errors of tcport: one class per cause, each saying what was wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator


class TcportError(Exception):
    """Base of every error tcport raises on purpose.

    Args:
        cause: one sentence: what was given (or what happened) and what is allowed.
        remedy: one sentence: what the reader should do next.

    Attributes:
        final: a chain's last word (a step that ``strict`` forbids, no link left): it blames no kernel around it.
    """

    final = False

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause} {self.remedy}"


def text_of(error: BaseException) -> str:
    """What an exception says; one whose own text raises says that, as anyone's may come by here."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  (it is part of the text)
        return f"(its text cannot be had: {type(broken).__name__})"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and everything it wraps."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = wrapped_by(error) or error.__cause__ or error.__context__


def wrapped_by(error: BaseException) -> BaseException | None:
    """What Inductor wrapped; an attribute of that name may be anything on anyone's exception."""
    inner = vars(error).get("inner_exception")
    return inner if isinstance(inner, BaseException) else None


class ShapeError(TcportError, ValueError):
    """A tensor has the wrong rank or size, or two tensors disagree about a dimension."""


class HeadRatioError(ShapeError):
    """The number of query heads is not a multiple of the number of KV heads."""


class DtypeError(TcportError, TypeError):
    """A tensor has a dtype that the operator does not take in that place."""


class DeviceMismatchError(TcportError, ValueError):
    """The tensors of one call do not all lie on one device."""


class ArgumentError(TcportError, ValueError):
    """A plain argument (window, softcap, chunk, num_splits, ...) is outside its range."""


class OptionError(TcportError, ValueError):
    """An option or mode given to ``torch.compile(..., backend="tcport")`` is unknown or malformed."""


class UnsupportedFeatureError(TcportError, NotImplementedError):
    """The request is well formed, but no path of tcport carries it out on this device."""


class UnsupportedVersionError(TcportError, ImportError):
    """The installed torch or triton lies outside the range tcport was written for."""


class KernelBuildError(TcportError, RuntimeError):
    """A kernel did not compile; the chain steps to the next candidate."""


class OutOfResourcesError(KernelBuildError):
    """A compiled kernel needs more shared memory, registers or threads than the device has."""


class SelfTestError(KernelBuildError):
    """A kernel compiled, ran, and gave wrong numbers on a problem whose answer is known."""


class BundleError(KernelBuildError):
    """A precompiled kernel cannot be used: corrupt, made for another device, compiler or version, or not loadable."""


class KernelLaunchError(TcportError, RuntimeError):
    """A compiled kernel could not be launched."""


class NoCandidateError(TcportError, RuntimeError):
    """Every candidate kernel refused a node and fallbacks were forbidden."""


class NoTileError(OutOfResourcesError):
    """No tile of the kernel fits the device; the chain steps to the next kernel."""


class PassError(TcportError, RuntimeError):
    """A graph pass raised, or left a graph that breaks a rule."""


class PassRegistrationError(TcportError, ValueError):
    """A pass cannot be registered or unregistered as asked."""


class PassOrderError(TcportError, ValueError):
    """The declared order of passes names an unknown pass or is a cycle."""


class PatternError(TcportError, ValueError):
    """A pattern is not one: its wildcards, its results or its replacement do not fit together."""


class MetadataError(TcportError, ValueError):
    """A block table, length, query range or slot holds a value that no kernel may follow (found in debug mode)."""


class PassConditionError(PassError):
    """A graph does not meet what a pass requires, or a pass did not leave what it ensures."""


class PassRaisedError(PassError):
    """A graph pass raised an exception."""


class PassResultError(PassError):
    """A graph pass returned something other than its number of matches, or a number that cannot be true."""


class PassMatchError(PassError):
    """A graph pass that must match matched nothing."""


class MalformedGraphError(PassError):
    """A graph pass left a graph whose nodes are used before they are computed, or belong to another graph."""


class EffectError(PassError):
    """A graph pass dropped or reordered a node that writes to its arguments."""


class NodeValueError(PassError):
    """A graph pass left a node or an output with another shape, stride, dtype or device than its operator gives."""


class LoweringRegistrationError(TcportError, ValueError):
    """A lowering cannot be registered: no such operator, or it does not agree with the operator's reference."""
