"""repack_int4_matmul: weights of 4 bits in any other layout, packed again as ``tcport::w4a16_matmul`` reads them.

Rules:
    1. The product of a matrix and of integers less a zero point, times a scale, both shared by groups of rows, becomes
       the repacking of the integers and ``tcport::w4a16_matmul``; the spellings are those of :data:`WEIGHTS` and
       :data:`PRODUCT`. How the integers were unpacked does not matter: AWQ's order of columns, or shifts in a buffer.
    2. The integers are known to have 4 bits: behind views, casts and choices of elements there is a ``& 15``.
    3. Rules 3 to 5 of :mod:`tcport.passes.fuse_int4_matmul`, which takes what needs no repacking.
    4. Only where a kernel is there that reads packed weights: not on a CPU.

Saves: the store and the load of the weights in 16 bits, for those of them in 4 bits: unpacking and repacking are one
generated kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from tcport import int4_ops as int4_ops  # defines the operator
from tcport.functional_write import is_view
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.kernels.int4 import MOST_ROWS, PER_WORD
from tcport.pass_values import derive
from tcport.pattern import Pattern, tensor
from tcport.pattern_match import Found, outside_user, written_between

aten, prims = torch.ops.aten, torch.ops.prims
_VIEWS = (aten.view.default, aten.reshape.default)
_MASKS = (aten.bitwise_and.Scalar, aten.__and__.Scalar)
_CHOICES = (aten.clone.default, aten.index.Tensor, aten.index_select.default, prims.convert_element_type.default)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def grouped(scales: Tensor, zeros: Tensor, levels: Tensor) -> Tensor:
    return (levels - zeros.unsqueeze(1)) * scales.unsqueeze(1)


def repeated(scales: Tensor, zeros: Tensor, x: Tensor, levels: Tensor) -> Tensor:
    group = levels.shape[0] // scales.shape[0]
    return x @ ((levels - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0))


_OF_GROUPS: dict[str, Any] = {"scales": tensor("g n"), "zeros": tensor("g n", (torch.int32, torch.int8, torch.uint8))}
# What replaces them is made by hand: a pattern of both would have to know that groups make up the depth of the product.
WEIGHTS = Pattern(grouped, grouped, levels=tensor("g m n", _INTEGERS), **_OF_GROUPS)
# In this order the sizes that a pattern is traced with, which only names tell apart, are those of whole groups.
PRODUCT = Pattern(repeated, repeated, **_OF_GROUPS, x=tensor("t 8p"), levels=tensor("8p n", _INTEGERS))


@register_pass(
    name="repack_int4_matmul",
    after=("fuse_int4_matmul",),
    before=("share_metadata", "select_tiles"),
    requires=(has_values,),
    params=(WEIGHTS, PRODUCT),
)
def repack_int4_matmul(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Repack the weights of every product that is left; returns their number."""
    matches = 0
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        if ctx.profile(product.meta["val"].device).vendor == "cpu":
            continue
        weight = product.args[1]
        while weight.target in _VIEWS:
            weight = weight.args[0]
        found = [each for each in (WEIGHTS.find(weight), PRODUCT.find(product)) if each is not None]
        whole = next((each for each in found if isinstance(each, Found)), None)
        reason = _obstacle(whole, product) if whole is not None else next(iter(found), None)
        if reason is not None:
            ctx.leave(product, reason)
        elif whole is not None:
            ctx.saved(0, [product.args[1].meta["val"]])
            _repack(graph, whole, product)
            matches += 1
    return matches


def _obstacle(found: Found, product: torch.fx.Node) -> str | None:
    """Why a product stays as it is; None where it need not."""
    nodes, root = found.bindings.nodes, found.bindings.root
    x, dense = (operand.meta["val"] for operand in product.args)  # type: ignore[union-attr]
    if not _has_four_bits(nodes["levels"]):
        return "its integers are not known to have 4 bits"
    if x.dtype != nodes["scales"].meta["val"].dtype:
        return "its scales have another dtype than its matrix"
    whole = statically_known_true(dense.shape[1] == nodes["scales"].meta["val"].shape[1])
    if not whole or not statically_known_true(dense.shape[0] % PER_WORD == 0):
        return "its rows are no whole words"
    if root is not product and (user := outside_user(root, (*found.inner, product))) is not None:
        return f"{user.name} uses the weights too"
    if not guard_or_false(x.shape[0] <= MOST_ROWS):
        return f"for more than {MOST_ROWS} rows weights are better dequantised once"
    return written_between(found)


def _has_four_bits(levels: Any) -> bool:
    """Whether integers are known to lie between 0 and 15."""
    while isinstance(levels, torch.fx.Node) and (is_view(levels) or levels.target in _CHOICES):
        levels = levels.args[0]
    return isinstance(levels, torch.fx.Node) and levels.target in _MASKS and levels.args[1:] == (15,)


def _repack(graph: torch.fx.Graph, found: Found, product: torch.fx.Node) -> None:
    """Put the packing of the integers and the operator in the place of a product."""

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta["val"] = derive(made)
        return made

    nodes, dense = found.bindings.nodes, product.args[1]
    depth, width = dense.meta["val"].shape  # type: ignore[union-attr]
    device = nodes["levels"].meta["val"].device
    with graph.inserting_before(product):
        levels = call(aten.reshape.default, nodes["levels"], [depth // PER_WORD, PER_WORD, width])
        if levels.meta["val"].dtype != torch.int32:
            levels = call(prims.convert_element_type.default, levels, torch.int32)
        places = call(
            prims.iota.default, PER_WORD, start=0, step=4, dtype=torch.int32, device=device, requires_grad=False
        )
        placed = call(aten.bitwise_left_shift.Tensor, levels, call(aten.unsqueeze.default, places, 1))
        packed = call(aten.sum.dim_IntList, placed, [1], False, dtype=torch.int32)
        fused = call(torch.ops.tcport.w4a16_matmul.default, product.args[0], packed, nodes["scales"], nodes["zeros"])
    product.replace_all_uses_with(fused)
    view: Any = dense
    if (root := found.bindings.root) is not product:
        graph.erase_node(product)
        while view is not root and not view.users:
            behind = view.args[0]
            graph.erase_node(view)
            view = behind
    found.erase()
