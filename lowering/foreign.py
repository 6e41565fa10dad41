"""Operators of other libraries as lowerings see them: their arguments by name, and the facts of these arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from tcport.device import DeviceProfile
from tcport.errors import LoweringRegistrationError, NoCandidateError
from tcport.ir import Dim
from tcport.lowering.candidate import Candidate, Rejection, Selection
from tcport.lowering.registry import Kernels, named, select
from tcport.lowering.spec import dim, dtype_name


@dataclasses.dataclass(frozen=True)
class ForeignCall:
    """A call of an operator: what its kernels' ``run(call, launch)`` takes.

    Attributes:
        args: the positional arguments. kwargs: the arguments given by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> ForeignCall:
        """The call behind an operator's own arguments."""
        return cls(args, kwargs)


@dataclasses.dataclass(frozen=True)
class TensorFacts:
    """A tensor reduced to what may choose a kernel; sizes and strides may be symbolic."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class ForeignSpec:
    """A call reduced to what may choose a kernel: facts in the place of tensors, everything else as it is."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


def foreign_spec(call: ForeignCall) -> ForeignSpec:
    """The spec of a call on real or fake tensors."""
    return ForeignSpec(tuple(map(_facts, call.args)), tuple((name, _facts(v)) for name, v in call.kwargs.items()))


def overload_of(name: str) -> Any:
    """The default overload of ``"namespace::name"``, or of ``"name"`` within ``tcport``.

    Raises:
        LoweringRegistrationError: there is no such operator.
    """
    if not isinstance(name, str):
        raise LoweringRegistrationError(f"An operator is named {name!r}.", "Give a text, 'namespace::name'.")
    namespace, operator = name.split("::", 1) if "::" in name else ("tcport", name)
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None or not hasattr(packet, "default"):
        dotted = "::" not in name and "." in name
        raise LoweringRegistrationError(
            f"There is no operator '{namespace}::{operator}'.",
            f"Write {'::'.join(name.split('.')[:2])!r}."
            if dotted
            else "Define it with torch.library first, or import the module that does.",
        )
    return packet.default


def chain_of(name: str) -> Callable[..., Selection]:
    """How the chain of an operator is chosen: the registered lowerings that fit, and last the operator itself."""

    def choose(spec: ForeignSpec, profile: DeviceProfile, *, kernel: Kernels = None) -> Selection:
        itself = Candidate(name, "torch", lambda call, launch: _twin_of(name)(*call.args, **call.kwargs), why="its own")
        try:
            chosen = select(name, spec, profile, kernel=kernel)
        except NoCandidateError as error:
            if named(name, kernel):
                raise
            return Selection((itself,), (Rejection("every lowering", error.cause),))
        return Selection((*chosen.candidates, itself), chosen.rejections)

    return choose


@functools.cache
def _twin_of(name: str) -> Any:
    """An operator that calls another one, and for which there is no lowering: a graph calls it as it is."""
    original = overload_of(name)
    twin, signature = f"call_{name.replace('::', '_')}", str(original._schema).partition("(")
    _LIBRARY.define(f"{twin}({signature[2]}")
    _LIBRARY.impl(twin, original, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tcport::{twin}", original, lib=_LIBRARY)
    return getattr(torch.ops.tcport, twin).default


_LIBRARY = torch.library.Library("tcport", "FRAGMENT")


def _facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes, strides = tuple(map(dim, value.shape)), tuple(map(dim, value.stride()))
        return TensorFacts(sizes, strides, dtype_name(value.dtype))
    if isinstance(value, (list, tuple)):
        return tuple(map(_facts, value))
    return dim(value) if isinstance(value, torch.SymInt) else value
