"""Autograd for operators that have no backward: the forward works in any grad mode, a backward raises our error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.library import Library

from tcport.errors import UnsupportedFeatureError

REFUSAL = "inference_only_backward"
"""Name of the operator that stands for a gradient nobody can have.

``torch.compile`` traces the backward of every forward whose inputs require a gradient, whether or not a backward ever
runs. An error raised while tracing would break a forward that is used for inference without ``torch.no_grad``; an
operator that raises only when it runs does not.
"""


def define_refusal(library: Library, tags: tuple[torch.Tag, ...]) -> None:
    """Define the operator that :func:`forbid_backward` puts in the place of a gradient."""
    library.define(f"{REFUSAL}(Tensor grad, str operator, SymInt[] size) -> Tensor", tags=tags)
    library.impl(REFUSAL, _raise, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"{library.ns}::{REFUSAL}", lambda grad, operator, size: grad.new_empty(size), lib=library
    )


def forbid_backward(library: Library, name: str) -> None:
    """Let ``name`` run forward with inputs that require a gradient, and refuse the gradient when it is asked for."""
    operator = getattr(getattr(torch.ops, library.ns), name).default

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        below = keyset.remove(keyset.highestPriorityTypeId())
        values = (*args, *kwargs.values())
        if any(isinstance(value, Tensor) and unpack_dual(value).tangent is not None for value in values):
            raise _refusal(str(operator.name()))  # the result would silently have no tangent
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values):
            return _InferenceOnly.apply(operator, below, tuple(kwargs), *values)
        return operator.redispatch(below, *args, **kwargs)

    library.impl(name, kernel, "Autograd", with_keyset=True)


class _InferenceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, keyset: Any, names: tuple[str, ...], *values: Any) -> Any:
        # Sizes, not tensors: a saved cache would be kept alive, and be changed by the next kv_write.
        ctx.operator = str(operator.name())
        ctx.sizes = [value.shape if isinstance(value, Tensor) else None for value in values]
        first = len(values) - len(names)
        return operator.redispatch(keyset, *values[:first], **dict(zip(names, values[first:], strict=True)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse = getattr(torch.ops.tcport, REFUSAL)
        return (
            *(None, None, None),
            *(
                refuse(grads[0], ctx.operator, size) if needed else None
                for size, needed in zip(ctx.sizes, ctx.needs_input_grad[3:], strict=True)
            ),
        )


def _raise(grad: Tensor, operator: str, size: list[int]) -> Tensor:
    raise _refusal(operator)


def _refusal(operator: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"A gradient was asked for through {operator}, which is for inference only.",
        "Run the model under torch.inference_mode(), or train with torch's scaled_dot_product_attention.",
    )
