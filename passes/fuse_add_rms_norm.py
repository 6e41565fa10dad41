"""fuse_add_rms_norm: the sum of a residual stream and the RMSNorm of that sum as one operator.

Rules:
    1. A sum of two tensors of one shape and dtype, and the root-mean-square norm of it over the last dimension with a
       weight of the same dtype, become ``tcport::add_rms_norm``; the spellings are those of :data:`PATTERN`.
    2. The sum may have other users after the norm, as the next residual has. Where anything else uses a value in
       between, or the sum before the norm is complete, everything stays as it is.
    3. An epsilon that is no number in the graph is left: under ``dynamic=True`` a float attribute is an input.
    4. Results that are not contiguous are left to Inductor.

Saves: a read of the sum, where norm and sum are two kernels.
"""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor
from torch.nn.functional import rms_norm

from tcport import layer_ops as layer_ops  # defines the operator
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.pattern import Pattern, number, tensor


def of_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, rms_norm(total, weight.shape, weight, eps)


def of_transformers(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.to(torch.float32)
    return total, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(total.dtype)


def fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.tcport.add_rms_norm(x, residual, weight, eps)


PATTERN = Pattern(
    (of_torch, of_transformers),
    fused,
    x=tensor("... d"),
    residual=tensor("... d"),
    weight=tensor("d"),
    eps=number(),
)


@register_pass(name="fuse_add_rms_norm", before=("select_tiles",), requires=(has_values,), params=PATTERN)
def fuse_add_rms_norm(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Fuse every sum with its norm; returns their number."""
    return PATTERN.rewrite(graph, ctx)
