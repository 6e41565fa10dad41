"""fuse_int4_matmul: weights of 4 bits that are dequantised and then multiplied, as one operator.

Rules:
    1. The product of a matrix and weights that are unpacked from int32 words along the dimension that is summed over,
       less a zero point, times a scale, both shared by groups of rows, becomes ``tcport::w4a16_matmul``; the spellings
       are those of :data:`PATTERNS`. The layout is GPTQ's.
    2. Shifts are an ``arange`` that stands in the graph. Where they are a buffer, their values are not known: left to
       ``repack_int4_matmul``.
    3. Zero points are integers of one value each, or 8. Where they are packed too, unpacking them stays in the graph.
    4. Scales have the dtype of the matrix. Where anything else uses the weights, everything stays as it is.
    5. A matrix of more than :data:`~tcport.kernels.int4.MOST_ROWS` rows is left: there a dequantise and a matmul are
       faster. Where the number is open, the graph becomes one for few rows or one for many, with a guard that tells.

Saves: the store and the load of the weights in 16 bits, four times the bytes they are packed in.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from tcport import int4_ops as int4_ops  # defines the operator
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.kernels.int4 import MOST_ROWS
from tcport.pattern import Bindings, Pattern, tensor

aten = torch.ops.aten
_SHIFTS = (torch.bitwise_right_shift, operator.rshift)
_RIGHT_SHIFTS = (aten.__rshift__.Tensor, aten.bitwise_right_shift.Tensor)


def _spelling(shift: Callable[..., Tensor], dtype: torch.dtype, cast: bool, rank: int) -> Callable[..., Tensor]:
    def dequantised_matmul(scales: Tensor, zeros: Tensor | int, x: Tensor, packed: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=dtype, device=packed.device)
        shifts = shifts[None, :, None] if rank == 3 else shifts[:, None]
        levels = shift(packed.unsqueeze(1), shifts) & 15
        groups, width = scales.shape
        levels = levels.reshape(groups, 8 * packed.shape[0] // groups, width)
        centred = levels - (zeros.unsqueeze(1) if isinstance(zeros, Tensor) else zeros)
        centred = centred.to(scales.dtype) if cast else centred
        return x @ (centred * scales.unsqueeze(1)).reshape(-1, width)

    return dequantised_matmul


def _symmetric(spelling: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def symmetric_matmul(scales: Tensor, x: Tensor, packed: Tensor) -> Tensor:
        return spelling(scales, 8, x, packed)

    return symmetric_matmul


def fused(scales: Tensor, zeros: Tensor, x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.tcport.w4a16_matmul(x, packed, scales, zeros)


def fused_symmetric(scales: Tensor, x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.tcport.w4a16_matmul(x, packed, scales, None)


def few_rows(bound: Bindings) -> str | None:
    """Why not, of a matrix of many rows."""
    few = guard_or_false(bound["x"].shape[0] <= MOST_ROWS)
    return None if few else f"for more than {MOST_ROWS} rows weights are better dequantised once"


_SPELLINGS = tuple(
    _spelling(*how) for how in itertools.product(_SHIFTS, (torch.int32, torch.int64), (False, True), (3, 2))
)
# In this order the sizes that a pattern is traced with, which only names tell apart, are those of whole groups.
_WILDCARDS: dict[str, Any] = {"scales": tensor("g n"), "x": tensor("t 8p"), "packed": tensor("p n", torch.int32)}
PATTERNS = (
    Pattern(
        _SPELLINGS, fused, guards=(few_rows,), zeros=tensor("g n", (torch.int32, torch.int8, torch.uint8)), **_WILDCARDS
    ),
    Pattern(tuple(map(_symmetric, _SPELLINGS)), fused_symmetric, guards=(few_rows,), **_WILDCARDS),
)


@register_pass(name="fuse_int4_matmul", before=("select_tiles",), requires=(has_values,), params=PATTERNS)
def fuse_int4_matmul(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Fuse every product with the unpacking of its weights; returns their number."""
    if not any(graph.find_nodes(op="call_function", target=target) for target in _RIGHT_SHIFTS):
        return 0
    return sum(pattern.rewrite(graph, ctx) for pattern in PATTERNS)
