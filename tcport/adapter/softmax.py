"""Spelling: products, mask and softmax written out, with matmul, ``@``, bmm, einsum or a product and a sum."""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx import Node

from tcport.adapter.algebra import Expr, equal
from tcport.adapter.attention import Attention, understand
from tcport.adapter.call import match_of
from tcport.adapter.contract import Contraction, contraction_of, is_contraction
from tcport.adapter.graph import GraphFacts
from tcport.adapter.logits import is_over_all, logits_of
from tcport.adapter.names import op_name
from tcport.adapter.reader import Reader, Ref
from tcport.adapter.registry import register_matcher
from tcport.adapter.report import Match, Rejected
from tcport.adapter.sizes import shape_of, tensor_of

_ELEMENTWISE = frozenset(
    {
        "mul",
        "multiply",
        "div",
        "truediv",
        "add",
        "sub",
        "where",
        "masked_fill",
        "dropout",
        "clamp",
        "relu",
        "exp",
        "log",
    }
)


@register_matcher("softmax", stage="attention")
def match_softmax(facts: GraphFacts, node: Node) -> Match | None:
    """Match a contraction of a softmax with V, whose logits are a contraction of Q with K."""
    if not is_contraction(node):
        return None

    def describe(reader: Reader) -> Attention | None:
        coords = tuple(reader.space.symbol("o", size) for size in shape_of(node))
        outer = contraction_of(reader, Ref(node, coords, facts.position[node]))
        for weights, value in () if outer is None else ((outer.left, outer.right), (outer.right, outer.left)):
            weighted = _weights(reader, weights)
            if outer is not None and weighted is not None:
                return _attention(reader, node, coords, outer, weighted, value)
        return None

    understood = understand(facts, describe)
    return None if understood is None else match_of(*understood, "softmax")


class _Weights:
    """The logits under a softmax: an element of them, the dimension normalised, the nodes passed."""

    def __init__(self, logits: Ref, dim: int, interior: set[Node]) -> None:
        self.logits, self.dim, self.interior = logits, dim, interior


def _weights(reader: Reader, ref: Ref) -> _Weights | None:
    """Follow one factor of a contraction back to a softmax; None when it is no such thing.

    Raises:
        Rejected: it was a softmax, and something was done to it since.
    """
    path = reader.path(ref)
    end = path[-1]
    interior = {step.node for step in path} | {end.node}
    if (inner := reader.apply({"nan_to_num": _nan_to_num}, end)) is not None:
        found = _weights(reader, inner)
        if found is not None:
            found.interior |= interior
        return found
    found = reader.apply(_SOFTMAX, end)
    if found is not None:
        found.interior |= interior
        return found
    made = reader.definition(end)
    if made is not None and op_name(made.node) in _ELEMENTWISE:
        name = op_name(made.node)
        for operand in made.node.all_input_nodes:
            if tensor_of(operand) is not None and len(shape_of(operand)) == len(end.coords):
                behind = reader.resolve(reader.broadcast(operand, made))
                if op_name(behind.node) in ("softmax", "_softmax"):
                    rule = "dropout" if name == "dropout" else "softmax"
                    raise Rejected(rule, f"the weights go through {made.node.name} ({name}) after the softmax")
    return None


def _attention(
    reader: Reader, node: Node, coords: tuple[Expr, ...], outer: Contraction, weights: _Weights, value: Ref
) -> Attention | None:
    space = reader.space
    keys = space.size_of(outer.indices)
    position = space.symbol("j", keys)
    over = weights.logits.coords[weights.dim]
    at = _merged(reader, outer.indices, over, position)
    if at is None or any(
        space.substitute(c, at).has(position) for i, c in enumerate(weights.logits.coords) if i != weights.dim
    ):
        raise Rejected("softmax", f"the softmax runs over another dimension than {node.name} sums over")

    def moved(ref: Ref) -> Ref:
        return Ref(ref.node, tuple(space.substitute(c, at) for c in ref.coords), ref.time)

    logits = logits_of(reader, moved(weights.logits), position)
    if logits is None:
        return None
    if not is_over_all(logits, shape_of(weights.logits.node)[weights.dim], keys):
        raise Rejected("softmax", f"{node.name} sums over {keys} of the weights that the softmax normalises")
    if len(logits.product.indices) != 1:
        raise Rejected("logits", f"{logits.product.node.name} sums over {len(logits.product.indices)} dimensions")
    sides = logits.product.left, logits.product.right
    keyed = [any(c.has(position) for c in side.coords) for side in sides]
    if keyed[0] == keyed[1]:
        raise Rejected("logits", f"{logits.product.node.name} is no product of one query with each key")
    key, query = sides if keyed[0] else sides[::-1]
    return Attention(
        anchor=node,
        coords=coords,
        query=query,
        key=key,
        value=moved(value),
        position=position,
        keys=keys,
        dims=logits.product.indices[0],
        scale=logits.scale,
        softcap=logits.softcap,
        visible=logits.visible,
        slopes=logits.slopes,
        sinks=logits.sinks,
        product=logits.product.node,
        interior=logits.interior | weights.interior,
    )


def _merged(reader: Reader, indices: tuple[Expr, ...], over: Expr, position: Expr) -> dict[Expr, Expr] | None:
    """The summed coordinates in terms of one key position, which the softmax runs over as ``over``."""
    space = reader.space
    weight = sympy.Integer(1)
    at: dict[Expr, Expr] = {}
    expected = sympy.Integer(0)
    for index in sorted(indices, key=lambda i: 0 if over.coeff(i) == 1 else 1):
        expected += weight * index
        at[index] = space.mod(space.floordiv(position, weight), space.sizes[index])
        weight = sympy.expand(weight * space.sizes[index])
    return at if equal(expected, over) else None


def _softmax(reader: Reader, ref: Ref, input: Node, dim: Any = None, *_: Any, **__: Any) -> _Weights | None:
    if not isinstance(dim, int):
        return None
    return _Weights(reader.ref(input, ref.coords, ref.time), dim % len(ref.coords), {ref.node})


def _quotient(reader: Reader, ref: Ref, input: Any, other: Any) -> _Weights | None:
    """``e / e.sum(dim, keepdim=True)`` with ``e = exp(logits)``."""
    if not all(isinstance(x, Node) and tensor_of(x) is not None for x in (input, other)):
        return None
    above, below = (reader.resolve(reader.broadcast(x, ref)) for x in (input, other))
    total = reader.apply({"sum": _total}, below)
    logits = reader.apply({"exp": _argument}, above)
    if total is None or logits is None or total[0] is not above.node:
        return None
    return _Weights(logits, total[1] % len(ref.coords), {ref.node, above.node, below.node})


def _total(reader: Reader, ref: Ref, input: Node, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    if isinstance(dim, list | tuple) and len(dim) == 1:
        dim = dim[0]
    if not keepdim or not isinstance(dim, int):
        return None
    return reader.resolve(reader.ref(input, ref.coords, ref.time)).node, dim


def _argument(reader: Reader, ref: Ref, input: Node) -> Ref:
    return reader.ref(input, ref.coords, ref.time)


def _nan_to_num(reader: Reader, ref: Ref, input: Node, nan: Any = 0.0, *_: Any, **__: Any) -> Ref | None:
    """Weights are NaN only in a row that sees no key, which the canonical operator makes 0 too."""
    return reader.ref(input, ref.coords, ref.time) if nan in (None, 0, 0.0) else None


_SOFTMAX = {
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    **dict.fromkeys(("div", "truediv"), _quotient),
}
