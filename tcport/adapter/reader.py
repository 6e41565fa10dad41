"""Reads a graph backwards: from one element of a tensor to the elements it was made of.

A :class:`Ref` is a tensor at a symbolic coordinate at a point in time. :meth:`Reader.resolve` follows it through
everything that only moves data (views, gathers, copies), whatever the spelling; :meth:`Reader.integer` turns an integer
element into an expression. What the handlers in the sibling modules do not know stays a leaf: never wrong, only opaque.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, Read, Space
from tcport.adapter.gather import GATHERS
from tcport.adapter.graph import GraphFacts, same_geometry
from tcport.adapter.integers import INTEGERS
from tcport.adapter.names import op_name
from tcport.adapter.sizes import is_size, shape_of, size_expr, tensor_of
from tcport.adapter.views import VIEWS

MOVES = {**VIEWS, **GATHERS}


@dataclasses.dataclass(frozen=True)
class Ref:
    """The element of ``node`` at ``coords``, as a reader at position ``time`` of the graph sees it."""

    node: Node
    coords: tuple[Expr, ...]
    time: int


class Reader:
    """Follows elements through one graph, and remembers every node it passed."""

    def __init__(self, facts: GraphFacts, space: Space) -> None:
        self.facts = facts
        self.space = space
        self.forms: list[tuple[Ref, Expr]] = []
        """Integer elements met so far and their expressions: nodes that a rewrite may use as they are."""

    def resolve(self, ref: Ref) -> Ref:
        """The element at the far end of all data movement."""
        return self.path(ref)[-1]

    def path(self, ref: Ref) -> list[Ref]:
        """``ref`` and the elements it was moved from, nearest first."""
        steps = [ref]
        while (step := self.step(steps[-1])) is not None:
            steps.append(step)
        return steps

    def step(self, ref: Ref) -> Ref | None:
        """Where a view, gather or copy took the element from; None when it was computed, or given."""
        return self.apply(MOVES, ref)

    def apply(self, handlers: Mapping[str, Callable[..., Any]], ref: Ref, *extra: Any) -> Any:
        """The result of the handler for the operation that made the element; None if there is none or it declines.

        A handler is called as ``handler(reader, ref, *extra, *args, **kwargs)`` with the operation's own arguments;
        ``ref.node`` is the operation and ``ref.time`` the time at which it read its operands.
        """
        made = self.definition(ref)
        handler = None if made is None else handlers.get(op_name(made.node) or "")
        if made is None or handler is None:
            return None
        kwargs = {{"self": "input"}.get(name, name): value for name, value in made.node.kwargs.items()}
        try:
            bound = inspect.signature(handler).bind(self, made, *extra, *made.node.args, **kwargs)
        except TypeError:  # an overload with arguments that the handler does not know
            return None
        return handler(*bound.args, **bound.kwargs)

    def definition(self, ref: Ref) -> Ref | None:
        """The operation that last wrote the element, with the time at which its operands were read.

        None when there is no single one: a graph input, or memory that several writes have put together.
        """
        node = ref.node
        if node.op in ("placeholder", "get_attr", "output"):
            return None
        source = next(iter(node.all_input_nodes), None) if not node.args else node.args[0]
        if isinstance(source, Node) and aliasing.aliases(node, source):
            if aliasing.is_mutation(node):  # an in-place result is its operand under another name
                return self.definition(Ref(source, ref.coords, ref.time)) if same_geometry(node, source) else None
            return ref
        last = self.facts.last_mutation(node, ref.time)
        if last is None:
            return Ref(node, ref.coords, self.facts.position[node])
        mutator, changed = last
        if same_geometry(changed, node):
            return Ref(mutator, ref.coords, self.facts.position[mutator])
        return None

    def ref(self, node: Node, coords: Iterable[Expr], time: int) -> Ref:
        """Shorthand for the handlers."""
        return Ref(node, tuple(coords), time)

    def integer(self, ref: Ref) -> Expr:
        """The value of an integer element as an expression over reads of other tensors."""
        path = self.path(ref)
        value = self.apply(INTEGERS, path[-1]) if counts(path[-1].node) else None
        if value is None:
            value = self.read(path[-1])
        value = sympy.expand(value)
        self.forms += [(step, value) for step in path]
        return value

    def read(self, ref: Ref) -> Expr:
        """The element as an opaque expression: equal for equal tensor, contents and coordinates."""
        return Read(self.facts.id_of(ref.node), self.facts.version(ref.node, ref.time), *ref.coords)

    def operand(self, value: Any, ref: Ref) -> Expr | None:
        """An argument of an integer operation: a number, a size, or an integer tensor broadcast to ``ref``."""
        if is_size(value):
            return size_expr(value)
        if not isinstance(value, Node) or not is_integral(value):
            return None
        return self.integer(self.broadcast(value, ref))

    def broadcast(self, node: Node, ref: Ref) -> Ref:
        """The element of ``node`` that meets the element ``ref`` of an elementwise result."""
        shape = shape_of(node)
        coords = ref.coords[len(ref.coords) - len(shape) :]
        zero = sympy.Integer(0)
        return Ref(node, tuple(zero if n == 1 else c for n, c in zip(shape, coords, strict=True)), ref.time)


def counts(node: Node) -> bool:
    """Whether integer arithmetic in a node's dtype is that of integers: narrow and unsigned ones wrap around early.

    Lengths, page ids and slots fit in 32 bits; what is beyond is not guarded against.
    """
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype in (torch.int32, torch.int64)


def is_integral(node: Node) -> bool:
    """Whether a node holds an integer (not bool) tensor."""
    tensor = tensor_of(node)
    if tensor is None:
        return False
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or str(tensor.dtype) == "torch.bool")
