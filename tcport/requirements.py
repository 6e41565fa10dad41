"""Rules that any operator's arguments may have to meet, each raising the error of its cause.

Sizes may be symbolic, and no tensor value is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tcport.errors import ArgumentError, DeviceMismatchError, DtypeError, ShapeError, TcportError


def require(condition: bool | torch.SymBool, error: Callable[[], TcportError]) -> None:
    """Raise ``error()`` unless ``condition`` holds.

    A condition on sizes that are not known while tracing becomes a run-time assertion of the compiled code, which an
    ``if`` could not express without fixing the size.
    """
    if isinstance(condition, torch.SymBool):
        try:
            torch._check(condition, lambda: str(error()))
        except RuntimeError as failed:
            raise error() from failed
    elif not condition:
        raise error()


def require_rank(name: str, tensor: Tensor, layout: str, remedy: str | None = None) -> None:
    """A dense tensor has the dimensions that ``layout`` names."""
    if tensor.layout != torch.strided:
        raise ShapeError(f"{name} has layout {tensor.layout}; allowed: torch.strided.", f"Pass {name}.to_dense().")
    rank = layout.count(",") + 1
    if tensor.dim() != rank:
        raise ShapeError(
            f"{name} has shape {sizes(tensor)}, and must have {rank} dimensions, {layout}.",
            remedy or f"Reshape {name} to {layout}.",
        )


def require_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], remedy: str | None = None) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise DtypeError(
            f"{name} has dtype {tensor.dtype}; allowed: {names}.", remedy or f"Convert {name} to one of these."
        )


def require_one_device(**tensors: Tensor | None) -> None:
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first, device = next(iter(given.items()))
    if any(other != device for other in given.values()):
        places = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise DeviceMismatchError(
            f"The tensors of one call must lie on one device, and these do not: {places}.",
            f"Move them to the device of {first}, {device}.",
        )


def require_places_of_its_own(name: str, tensor: Tensor) -> None:
    """Each element of a tensor that is written has memory of its own: no dimension is expanded."""
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        if isinstance(stride, int) and stride == 0:
            require(
                size <= 1,
                lambda: ArgumentError(
                    f"{name} has shape {sizes(tensor)} with strides {list(tensor.stride())}: elements share memory, "
                    "and a write to one would be a write to others.",
                    f"Pass {name} as it was before it was expanded.",
                ),
            )


def require_finite(name: str, number: float, remedy: str) -> None:
    require(
        -math.inf < number < math.inf,
        lambda: ArgumentError(f"{name} is {number}, and must be a finite number.", remedy),
    )


def require_agreement(
    a: str, size_a: int | torch.SymInt, b: str, size_b: int | torch.SymInt, what: str, remedy: str
) -> None:
    """Two tensors have one size in what they share."""
    require(size_a == size_b, lambda: ShapeError(f"{a} and {b} disagree about {what}: {size_a} and {size_b}.", remedy))


def sizes(tensor: Tensor) -> str:
    return f"[{', '.join(str(size) for size in tensor.shape)}]"
