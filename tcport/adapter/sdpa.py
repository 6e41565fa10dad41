"""Spelling: K and V gathered, then ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import sympy
import torch.nn.functional as F
from torch.fx import Node

from tcport.adapter.algebra import Expr
from tcport.adapter.attention import Attention, understand
from tcport.adapter.booleans import TRUE, AtLeastZero, Formula, all_of, boolean
from tcport.adapter.call import match_of
from tcport.adapter.graph import GraphFacts
from tcport.adapter.levels import levels_of, visible
from tcport.adapter.logits import number_of
from tcport.adapter.reader import Reader, Ref
from tcport.adapter.registry import register_matcher
from tcport.adapter.report import Match, Rejected
from tcport.adapter.sizes import shape_of, tensor_of


@register_matcher("sdpa", stage="attention", targets=(F.scaled_dot_product_attention,))
def match_sdpa(facts: GraphFacts, node: Node) -> Match | None:
    """Match ``F.scaled_dot_product_attention`` over a gathered K and V, with a bool, float or ``is_causal`` mask."""
    args: Any = node.args
    kwargs: Any = node.kwargs
    understood = understand(facts, lambda reader: _Call(reader, node, *args, **kwargs).attention())
    return None if understood is None else match_of(*understood, "sdpa")


class _Call:
    """The arguments of one call, under their own names."""

    def __init__(
        self,
        reader: Reader,
        node: Node,
        query: Node,
        key: Node,
        value: Node,
        attn_mask: Node | None = None,
        dropout_p: Any = 0.0,
        is_causal: Any = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> None:
        self.reader, self.node = reader, node
        self.query, self.key, self.value, self.attn_mask = query, key, value, attn_mask
        self.dropout_p, self.is_causal, self.scale, self.enable_gqa = dropout_p, is_causal, scale, enable_gqa

    def attention(self) -> Attention:
        """The call in the coordinates of its result ``[..., heads, queries, value dim]``."""
        reader, node, space = self.reader, self.node, self.reader.space
        if not isinstance(self.dropout_p, int | float) or self.dropout_p != 0:
            raise Rejected("dropout", f"dropout_p is {self.dropout_p}")
        if self.enable_gqa:
            for heads in (self.query, self.key, self.value):
                reader.facts.fix(shape_of(heads)[-3])  # only the ratio of two numbers is certain to divide evenly
        shape = shape_of(node)
        time = reader.facts.position[node]
        *batch, row, column = coords = tuple(space.symbol("o", size) for size in shape)
        dims = space.symbol("d", shape_of(self.query)[-1])
        keys = shape_of(self.key)[-2]
        position = space.symbol("j", keys)

        def at(tensor: Node, row: Expr, column: Expr) -> Ref:
            lead = list(batch)
            if self.enable_gqa and lead:
                lead[-1] = space.floordiv(lead[-1], self._group(tensor))
            return reader.broadcast(tensor, Ref(node, (*lead, row, column), time))

        return Attention(
            anchor=node,
            coords=coords,
            query=reader.broadcast(self.query, Ref(node, (*batch, row, dims), time)),
            key=at(self.key, position, dims),
            value=at(self.value, position, column),
            position=position,
            keys=keys,
            dims=dims,
            scale=None if self.scale is None else self._scale(time),
            softcap=0.0,
            visible=self._visible(Ref(node, (*batch, row, position), time), row, position),
            product=node,
            token=row,
        )

    def _scale(self, time: int) -> float:
        number = number_of(self.reader, Ref(self.node, (), time), self.scale)
        if number is None:
            raise Rejected("scale", f"the scale is {self.scale}, not a number")
        return number

    def _visible(self, ref: Ref, row: Expr, position: Expr) -> Formula:
        causal = self.is_causal
        if isinstance(causal, Node):
            causal = bool(causal.meta["example_value"])
        causal_part = AtLeastZero(sympy.expand(row - position)) if causal else TRUE  # aligned at the top left
        if self.attn_mask is None:
            return causal_part
        tensor = tensor_of(self.attn_mask)
        at = self.reader.broadcast(self.attn_mask, ref)
        if tensor is not None and str(tensor.dtype) == "torch.bool":
            return all_of(causal_part, boolean(self.reader, at))
        levels = levels_of(self.reader, at)
        where = None if levels is None else visible(levels)
        if where is None:
            raise Rejected("mask", f"the float mask {self.attn_mask.name} is not known to hold only 0 and -inf")
        return all_of(causal_part, where)

    def _group(self, tensor: Node) -> Expr:
        """Query heads per head of ``tensor``."""
        ratio = shape_of(self.node)[-3] / shape_of(tensor)[-3]
        if not ratio.is_Integer:
            raise Rejected("sizes", f"the query heads are no known multiple of the heads of {tensor.name}")
        return ratio
