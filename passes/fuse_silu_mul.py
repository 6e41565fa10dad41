"""fuse_silu_mul: ``silu(gate) * up`` as one operator.

Rules:
    1. The product of one tensor's SiLU and another tensor of the same shape and dtype, in either order, becomes
       ``tcport::silu_mul``; the spellings are those of :data:`PATTERN`.
    2. Where the SiLU has other users, everything stays as it is.
    3. Where the product would not be contiguous, everything stays as it is: layouts are left to Inductor.

Saves: the store and the load of the SiLU in code that runs operation by operation; a kernel that is chosen like any
other, and not generated, in compiled code.
"""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor
from torch.nn.functional import silu

from tcport import layer_ops as layer_ops  # defines the operator
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.pattern import Pattern, tensor


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def fused(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.tcport.silu_mul(gate, up)


PATTERN = Pattern((gated, by_sigmoid), fused, gate=tensor("... d"), up=tensor("... d"))


@register_pass(name="fuse_silu_mul", before=("select_tiles",), requires=(has_values,), params=PATTERN)
def fuse_silu_mul(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Fuse every gated product; returns their number."""
    return PATTERN.rewrite(graph, ctx)
