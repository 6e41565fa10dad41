"""Facts about a Dynamo graph that every matcher needs: order, example values, sizes, and who changes what when."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, equal
from tcport.adapter.sizes import size_expr, tensor_of


class GraphFacts:
    """An index over one graph, valid until the graph changes.

    Positions in the graph serve as points in time: the value that node r reads from a tensor is what the mutations at
    positions before r's own have left there.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.module = gm
        self.nodes: tuple[Node, ...] = tuple(gm.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        values: list[Any] = [node.meta.get("example_value") for node in self.nodes]
        self.fake_mode: Any = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
        self.news = False
        """Set when sizes have become known to be equal while the graph was read."""
        self._shared: dict[str, Any] = {}
        self._ids: dict[Node, int] = {}
        self._mutations: dict[int, list[tuple[int, Node, Node]]] = {}
        for node in self.nodes:
            for changed in aliasing.mutated(node):
                for storage in aliasing.storages(changed):
                    self._mutations.setdefault(storage, []).append((self.position[node], node, changed))

    def shared(self, name: str, make: Callable[[GraphFacts], Any]) -> Any:
        """Something a matcher knows about the whole graph, made at the first request."""
        if name not in self._shared:
            self._shared[name] = make(self)
        return self._shared[name]

    def id_of(self, node: Node) -> int:
        """A small number that stands for the node inside :class:`~tcport.adapter.algebra.Read`."""
        return self._ids.setdefault(node, len(self._ids))

    def node_of(self, number: Expr | int) -> Node:
        """The node :meth:`id_of` gave this number."""
        return list(self._ids)[int(number)]

    def mutations(self, node: Node, start: int, stop: int) -> Iterator[tuple[Node, Node]]:
        """``(mutating node, the tensor it was handed)`` for the storage of ``node`` at positions in [start, stop)."""
        for storage in aliasing.storages(node):
            for position, mutator, changed in self._mutations.get(storage, ()):
                if start <= position < stop:
                    yield mutator, changed

    def last_mutation(self, node: Node, before: int) -> tuple[Node, Node] | None:
        """The latest mutation of the storage of ``node`` at a position below ``before``."""
        found = list(self.mutations(node, 0, before))
        return max(found, key=lambda pair: self.position[pair[0]], default=None)

    def version(self, node: Node, time: int) -> int:
        """How many mutations the storage of ``node`` has seen before ``time``: equal versions, equal contents."""
        return sum(
            bisect.bisect_left([p for p, *_ in self._mutations.get(storage, ())], time)
            for storage in aliasing.storages(node)
        )

    @functools.cached_property
    def _open_sizes(self) -> tuple[torch.SymInt, ...]:
        """One size of the graph for each expression that was open when it was first asked for."""
        sizes = (size for node in self.nodes for size in _sizes_of(node) if isinstance(size, torch.SymInt))
        return tuple({size.node.expr: size for size in sizes}.values())

    def fix(self, expr: Expr) -> bool:
        """Give the size symbols in ``expr`` their values of this trace, under a guard; False if they have none yet.

        A kernel is compiled for its head counts, head dims and page size; they never vary within a model, and are
        symbols only when everything was marked dynamic.
        """
        symbols = expr.free_symbols
        for symbol in symbols:
            size = next((s for s in self._open_sizes if s.node.expr == symbol), None)
            if size is not None and size.node.has_hint():
                int(size)
        return not symbols or not any(size.node.expr.free_symbols & symbols for size in self._open_sizes)

    def holds(self, size: Expr) -> bool:
        """Whether ``size >= 0`` in this trace, under a guard by which torch compiles anew where it is not."""
        known: dict[Any, Any] = {s.node.expr: s for s in self._open_sizes}
        symbols = [known.get(symbol) for symbol in size.free_symbols]
        if not all(s is not None and s.node.has_hint() for s in symbols):
            return False
        hints = {s.node.expr: s.node.hint for s in symbols if s is not None}
        if size.xreplace(hints) < 0:
            return False
        return not symbols or bool(known[next(iter(hints))].node.shape_env.evaluate_expr(sympy.Ge(size, 0)))


def _sizes_of(node: Node) -> Iterator[int | torch.SymInt]:
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        yield value
    tensor = tensor_of(node)
    if tensor is not None:
        yield from tensor.shape


def same_geometry(a: Node, b: Node) -> bool:
    """Whether two tensor nodes are the same elements in the same order: one tensor under two names."""
    x, y = tensor_of(a), tensor_of(b)
    if x is None or y is None or x.dtype != y.dtype or x.dim() != y.dim():
        return False
    facts = zip((*x.shape, *x.stride(), x.storage_offset()), (*y.shape, *y.stride(), y.storage_offset()), strict=True)
    return all(equal(size_expr(left), size_expr(right)) for left, right in facts)
