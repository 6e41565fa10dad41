"""What lies between q.k and the softmax: scale, softcap, masks, ALiBi, sinks, in whatever order means the same."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from tcport.adapter.algebra import Expr, equal
from tcport.adapter.booleans import TRUE, Formula, all_of, boolean, negated
from tcport.adapter.contract import Contraction, contraction_of
from tcport.adapter.levels import HIDING, Levels, constant_of, levels_of, visible
from tcport.adapter.names import op_name
from tcport.adapter.report import Rejected
from tcport.adapter.sizes import shape_of, tensor_of

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logit of one key: ``softcap * tanh(scale * product / softcap) + slope * position``, where visible."""

    product: Contraction
    scale: float
    softcap: float
    visible: Formula
    slopes: Ref | None
    sinks: Ref | None
    interior: frozenset[Node]


def logits_of(reader: Reader, ref: Ref, key: Expr) -> Logits | None:
    """Read one logit back to its product q.k; None when there is no product behind it.

    Args:
        reader: the reader.
        ref: an element of what the softmax takes.
        key: the coordinate of the key in it.

    Raises:
        Rejected: there is something in between that the canonical operator does not have.
    """
    return _Walk(reader, key).to_product(ref)


class _Walk:
    """State of one walk from the softmax inwards."""

    def __init__(self, reader: Reader, key: Expr) -> None:
        self.reader = reader
        self.key = key
        self.factor = 1.0
        self.softcap = 0.0
        self.visible: Formula = TRUE
        self.slopes: Ref | None = None
        self.sinks: Ref | None = None
        self.interior: set[Node] = set()

    def to_product(self, ref: Ref) -> Logits | None:
        current = ref
        while True:
            path = self.reader.path(current)
            self.interior.update(step.node for step in path)
            end = path[-1]
            product = contraction_of(self.reader, end)
            if product is not None:
                self.interior.add(product.node)
                scale = self.factor * (self.softcap or 1.0)
                return Logits(
                    product, scale, self.softcap, self.visible, self.slopes, self.sinks, frozenset(self.interior)
                )
            made = self.reader.definition(end)
            inner = self.reader.apply(_STEPS, end, self)
            if inner is None:
                if made is None or not self._leads_to_product(made.node):
                    return None
                raise Rejected("logits", f"the logits go through {made.node.name} ({op_name(made.node)})")
            self.interior.add(made.node if made is not None else end.node)
            current = inner

    def hide(self, where: Formula, node: Node) -> None:
        """Keys are visible only where the formula holds."""
        if self.factor != 1.0 or self.softcap:
            raise Rejected("logits", f"{node.name} masks the logits before they are scaled or capped")
        self.visible = all_of(self.visible, where)

    def shifted(self, node: Node) -> None:
        """All logits of a row move by one amount, which no softmax notices, unless a sink stays or a tanh follows."""
        if self.softcap:
            raise Rejected("logits", f"{node.name} moves the logits before they are capped")
        if self.sinks is not None:
            raise Rejected("logits", f"{node.name} moves the logits of a row but not its sink")

    def scaled(self, ref: Ref, value: Any, node: Node, *, divide: bool = False) -> bool:
        """Take a number into the scale; False if ``value`` is none."""
        number = number_of(self.reader, ref, value)
        if number is None:
            return False
        if not number:
            raise Rejected("scale", f"{node.name} multiplies the logits by zero, or divides them by it")
        self.factor *= 1.0 / number if divide else number
        return True

    def _leads_to_product(self, node: Node, depth: int = 6) -> bool:
        """Whether a contraction lies a few operations behind ``node``: it looks like attention."""
        if depth == 0 or node.op not in ("call_function", "call_method"):
            return False
        if op_name(node) in ("matmul", "bmm", "einsum", "baddbmm"):
            return True
        return any(self._leads_to_product(n, depth - 1) for n in node.all_input_nodes if tensor_of(n) is not None)


def number_of(reader: Reader, ref: Ref, value: Any) -> float | None:
    """A Python number, a symbolic number (which becomes fixed in this graph), or a tensor of one constant."""
    if isinstance(value, Node):
        held = value.meta.get("example_value")
        if isinstance(held, torch.SymFloat | torch.SymInt):
            return float(held)
    return constant_of(reader, ref, value)


def _mul(reader: Reader, ref: Ref, walk: _Walk, input: Any, other: Any) -> Ref | None:
    for value, rest in ((other, input), (input, other)):
        if isinstance(rest, Node) and tensor_of(rest) is not None and walk.scaled(ref, value, ref.node):
            return reader.broadcast(rest, ref)
    raise Rejected("scale", f"the logits are multiplied by a tensor in {ref.node.name}")


def _div(reader: Reader, ref: Ref, walk: _Walk, input: Any, other: Any) -> Ref | None:
    if not walk.scaled(ref, other, ref.node, divide=True):
        raise Rejected("scale", f"the logits are divided by a tensor in {ref.node.name}")
    return reader.broadcast(input, ref)


def _tanh(reader: Reader, ref: Ref, walk: _Walk, input: Node) -> Ref:
    if walk.softcap:
        raise Rejected("logits", f"{ref.node.name} is a second tanh")
    if walk.factor <= 0:
        raise Rejected("logits", f"{ref.node.name} is a tanh that is multiplied by {walk.factor}")
    walk.softcap, walk.factor = walk.factor, 1.0
    return reader.broadcast(input, ref)


def _masked_fill(reader: Reader, ref: Ref, walk: _Walk, input: Node, mask: Node, value: Any) -> Ref:
    level = constant_of(reader, ref, value)
    if level is None or level > HIDING:
        raise Rejected("mask", f"{ref.node.name} fills logits with {value}, which does not hide a key")
    walk.hide(negated(boolean(reader, reader.broadcast(mask, ref))), ref.node)
    return reader.broadcast(input, ref)


def _where(reader: Reader, ref: Ref, walk: _Walk, condition: Node, input: Any, other: Any) -> Ref:
    where = boolean(reader, reader.broadcast(condition, ref))
    for kept, filled, formula in ((input, other, where), (other, input, negated(where))):
        level = constant_of(reader, ref, filled)
        if level is not None and isinstance(kept, Node):
            if level > HIDING:
                raise Rejected("mask", f"{ref.node.name} fills logits with {level}, which does not hide a key")
            walk.hide(formula, ref.node)
            return reader.broadcast(kept, ref)
    raise Rejected("mask", f"{ref.node.name} chooses between two tensors, neither of which is a constant")


def _add(reader: Reader, ref: Ref, walk: _Walk, input: Any, other: Any) -> Ref:
    return _added(reader, ref, walk, input, other, sign=1)


def _sub(reader: Reader, ref: Ref, walk: _Walk, input: Any, other: Any) -> Ref:
    return _added(reader, ref, walk, input, other, sign=-1)


def _added(reader: Reader, ref: Ref, walk: _Walk, input: Any, other: Any, sign: int) -> Ref:
    """``logits + y`` where y is a mask, an ALiBi bias, or the same for all keys."""
    for rest, term in ((input, other), (other, input)):
        if not isinstance(rest, Node) or tensor_of(rest) is None or (sign < 0 and rest is not input):
            continue
        if not isinstance(term, Node) or tensor_of(term) is None:
            walk.shifted(ref.node)
            return reader.broadcast(rest, ref)  # a number
        at = reader.broadcast(term, ref)
        if not any(coord.has(walk.key) for coord in at.coords) and not walk.softcap:
            walk.shifted(ref.node)
            return reader.broadcast(rest, ref)
        levels: Levels | None = levels_of(reader, at)
        if levels is not None:
            where = visible(levels) if sign > 0 else None
            if where is None:
                raise Rejected("mask", f"{term.name} holds values that neither leave a logit as it is nor hide it")
            walk.hide(where, ref.node)
            return reader.broadcast(rest, ref)
        slopes = _alibi(reader, at, walk.key) if sign > 0 else None
        if slopes is not None and walk.slopes is None and walk.factor == 1.0 and not walk.softcap:
            walk.shifted(ref.node)  # the bias counts from some position, which need not be the query's
            walk.slopes = slopes
            return reader.broadcast(rest, ref)
    names = " and ".join(str(x) for x in (input, other))
    raise Rejected("mask", f"{ref.node.name} adds {names}: neither is known to hold only 0 and -inf")


def _alibi(reader: Reader, ref: Ref, key: Expr) -> Ref | None:
    """The slope, if the element is ``slope * (key position + anything that is the same for all keys)``."""
    pair = reader.apply({"mul": _both, "multiply": _both}, reader.resolve(ref))
    if pair is None:
        return None
    for slope, distance in (pair, pair[::-1]):
        if any(coord.has(key) for coord in slope.coords):
            continue
        position = _as_integer(reader, distance)
        if position is not None and position.coeff(key) == 1:
            offset = position - key
            if not offset.has(key):
                return reader.resolve(slope)
    return None


def _both(reader: Reader, ref: Ref, input: Any, other: Any) -> tuple[Ref, Ref] | None:
    if not all(isinstance(x, Node) and tensor_of(x) is not None for x in (input, other)):
        return None
    return reader.broadcast(input, ref), reader.broadcast(other, ref)


def _as_integer(reader: Reader, ref: Ref) -> Expr | None:
    """A float element that was an integer before a cast."""
    end = reader.resolve(ref)
    casts: dict[str, Any] = dict.fromkeys(("to", "float", "half", "bfloat16", "double", "type", "type_as"), _cast)
    value = reader.apply(casts, end)
    return reader.integer(end) if value is None else value


def _cast(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Expr | None:
    return reader.operand(input, ref)


def _cat(reader: Reader, ref: Ref, walk: _Walk, tensors: Any, dim: int = 0) -> Ref | None:
    """``cat([logits, sink])``: one more logit per row, whose weight is thrown away afterwards."""
    if not isinstance(tensors, list | tuple) or len(tensors) != 2 or walk.sinks is not None:
        return None
    first, second = tensors
    if ref.coords[dim] != walk.key or shape_of(second)[dim] != 1:
        return None
    if walk.factor != 1.0 or walk.softcap or walk.visible != TRUE:
        raise Rejected("logits", f"the sink in {ref.node.name} is scaled, capped or masked")
    if not reader.space.at_least(shape_of(first)[dim], reader.space.sizes[walk.key]):
        return None
    walk.sinks = reader.resolve(reader.broadcast(second, ref))
    return reader.ref(first, ref.coords, ref.time)


_STEPS = {
    **dict.fromkeys(("mul", "multiply"), _mul),
    **dict.fromkeys(("div", "truediv", "divide"), _div),
    "tanh": _tanh,
    "masked_fill": _masked_fill,
    "where": _where,
    "add": _add,
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
}


def is_over_all(logits: Logits, size: Expr, keys: Expr) -> bool:
    """Whether a softmax over ``size`` logits is over all ``keys`` keys, plus one sink if there is one."""
    return equal(size, keys + (0 if logits.sinks is None else 1))
