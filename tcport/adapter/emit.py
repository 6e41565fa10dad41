"""Writes nodes into the graph: views, integer and boolean tensors described by expressions, calls of operators.

Every node gets its ``example_value`` by running the operation on those of its arguments, and repeated requests in one
graph give one node: the layers of a model share their lengths and tables.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, FloorDiv, Read, Space, equal
from tcport.adapter.booleans import And, AtLeastZero, Flag, Formula, Not, Truth
from tcport.adapter.digits import digits_of
from tcport.adapter.graph import GraphFacts
from tcport.adapter.names import OpOverload
from tcport.adapter.reader import Ref, counts
from tcport.adapter.report import Rejected
from tcport.adapter.sizes import leaves, shape_of, size_expr

Groups = Sequence[Sequence[Expr]]
"""The dimensions of a tensor to emit, each the row-major merge of the listed coordinates; an empty one has size 1."""


class Emitter:
    """Inserts nodes in front of one node of a graph."""

    def __init__(
        self,
        facts: GraphFacts,
        before: Node,
        memo: dict[Hashable, Node],
        replaced: dict[Node, Node],
    ) -> None:
        self.facts = facts
        self.before = before
        self.time = facts.position[before]
        self.memo = memo
        self.replaced = replaced
        self.added: list[Node] = []
        self.space = Space()
        self.forms: list[tuple[Ref, Expr]] = []
        self.device: torch.device | None = None

    def use(self, space: Space, forms: list[tuple[Ref, Expr]], device: torch.device) -> None:
        """Set where expressions get their meaning from.

        Args:
            space: the ranges of the coordinates in them.
            forms: integer tensors known to hold an expression.
            device: where to make tensors that read no other.
        """
        self.space, self.forms, self.device = space, forms, device

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        """A call of a function, or of the method ``target`` of ``args[0]``, in front of the anchor."""
        given: Any = map_arg((args, kwargs), lambda n: self.replaced.get(n, n))
        operands = [leaf for leaf in leaves(list(given)) if isinstance(leaf, Node)]
        for operand in operands:
            if not operand < self.before:
                raise Rejected("written", f"{operand.name} is computed only after {self.before.name}")
        # The versions of what is read are part of the request: a tensor that has changed is read again.
        key = (target, _hashable(given), tuple(self.facts.version(n, self.time) for n in operands))
        known = self.memo.get(key)
        if known is not None and known.graph is self.before.graph and known < self.before:
            return known
        graph = self.before.graph
        with graph.inserting_before(self.before):
            node = graph.call_method(target, *given) if isinstance(target, str) else graph.call_function(target, *given)
        self.added.append(node)
        node.meta["example_value"] = self._example(node)
        for name in ("stack_trace", "custom", "nn_module_stack", "source_fn_stack"):
            if name in self.before.meta:
                node.meta[name] = self.before.meta[name]
        if not aliasing.is_mutation(node) and not _is_custom(target):
            self.memo[key] = node
        return node

    def undo(self) -> None:
        """Erase what this emitter added."""
        self._erase(self.added)

    def tidy(self, result: Node | None) -> None:
        """Erase what this emitter added and then had no use for."""
        for node in reversed(self.added):
            if node is not result and not node.users and not aliasing.is_mutation(node):
                self._erase([node])

    def _erase(self, nodes: list[Node]) -> None:
        for node in reversed(nodes):
            self.before.graph.erase_node(node)
        erased = set(nodes)
        self.added = [node for node in self.added if node not in erased]
        for key in [key for key, node in self.memo.items() if node in erased]:
            del self.memo[key]

    def fresh(self, ref: Ref) -> bool:
        """Whether the tensor still holds at the anchor what it held when ``ref`` was read."""
        return self.facts.version(ref.node, ref.time) == self.facts.version(ref.node, self.time)

    def size(self, expr: Any) -> int | Node:
        """A size as an argument: an int, or a node that computes it."""
        expr = sympy.sympify(expr).expand()
        if expr.is_Integer:
            return int(expr)
        earlier = self.facts.nodes[: self.time]
        for node in earlier:
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt) and equal(size_expr(value), expr):
                return node
        given = [node for node in earlier if node.op in ("placeholder", "get_attr")]
        found = self._size_among(given, expr)
        if found is not None:
            return found
        if isinstance(expr, sympy.Add | sympy.Mul):
            combine = operator.add if isinstance(expr, sympy.Add) else operator.mul
            total, *rest = map(self.size, expr.args)
            for part in rest:
                total = self.call(combine, total, part)
            return total
        found = self._size_among(earlier, expr)
        if found is not None:
            return found
        raise Rejected("sizes", f"no tensor before {self.before.name} has size {expr}")

    def view(self, ref: Ref, groups: Groups, *, whole: Iterable[Expr] = (), broadcast: bool = False) -> Node:
        """The elements of ``ref`` laid out as ``groups`` say, by views of ``ref.node`` (a reshape last, if need be).

        Args:
            ref: an element whose coordinates are affine in the coordinates of the groups.
            groups: the dimensions of the result.
            whole: coordinates that run over all there is, whatever their own size says.
            broadcast: leave dimensions that the element does not depend on at size 1, instead of expanding them.

        Raises:
            Rejected: the coordinates are no view of the tensor.
        """
        ref, groups = self._fused(ref, groups)
        wanted = _flat(groups)
        node, axes = ref.node, []
        for size, coord in zip(shape_of(ref.node), ref.coords, strict=True):
            digits = digits_of(self.space, coord, size, set(whole))
            if digits is None:
                raise Rejected("layout", f"{ref.node.name} is read at {coord}, which no view of it expresses")
            dim = len(axes)
            if len(digits) > 1:
                node = self.call(
                    "unflatten", node, dim, tuple(-1 if not i else self.size(d.radix) for i, d in enumerate(digits))
                )
            for digit in digits:
                if digit.symbol is None:
                    node = self.call("select", node, len(axes), self.size(digit.start))
                    continue
                if not digit.is_all:
                    node = self.call("narrow", node, len(axes), self.size(digit.start), self.size(digit.length))
                axes.append(digit.symbol)
        if len(set(axes)) != len(axes) or not set(axes) <= set(wanted):
            raise Rejected("layout", f"{ref.node.name} is read at ({', '.join(map(str, ref.coords))})")
        order = [axes.index(axis) for axis in wanted if axis in axes]
        if order != sorted(order):
            node = self.call("permute", node, *order)
        return self._grouped(node, groups, set(axes), broadcast)

    def integer(self, expr: Expr, groups: Groups, *, whole: Iterable[Expr] = ()) -> Node:
        """An integer tensor with the value of ``expr`` at every point of ``groups``.

        Raises:
            Rejected: it cannot be built from tensors that still hold what the expression read.
        """
        expr = sympy.expand(expr)
        for ref in self._sources(expr):
            with contextlib.suppress(Rejected):
                return self._counting(self.view(ref, groups, whole=whole))
        if not self.space.symbols_of(expr) and not expr.has(Read):
            sizes = tuple(self.size(self.space.size_of(group)) for group in groups)
            return self.call(torch.full, sizes, self.size(expr), dtype=torch.int32, device=self.device)
        computed = self._computed(expr, _flat(groups))
        if isinstance(computed, int):
            raise Rejected("layout", f"{expr} is a number, not a tensor")
        return self._merged(computed, groups)

    def boolean(self, formula: Formula, groups: Groups) -> Node:
        """A bool tensor that says at every point of ``groups`` whether ``formula`` holds.

        Raises:
            Rejected: as :meth:`integer`.
        """
        return self._merged(self._decided(formula, _flat(groups)), groups)

    def _fused(self, ref: Ref, groups: Groups) -> tuple[Ref, Groups]:
        """Treat neighbours in a group that are neighbours in the tensor as one coordinate: no need to split them."""
        coords, fused = list(ref.coords), [list(group) for group in groups]
        for group in fused:
            i = 0
            while i + 1 < len(group):
                slow, fast = group[i : i + 2]
                inner = self.space.sizes[fast]
                at = [d for d, c in enumerate(coords) if c.has(slow) or c.has(fast)]
                weight = coords[at[0]].coeff(fast) if len(at) == 1 else 0
                if weight == 0 or not equal(coords[at[0]].coeff(slow), weight * inner):
                    i += 1
                    continue
                both = self.space.symbol("f", self.space.size_of([slow, fast]))
                rest = coords[at[0]] - weight * (inner * slow + fast)
                coords[at[0]] = sympy.expand(rest + weight * both)
                group[i : i + 2] = [both]
        return Ref(ref.node, tuple(coords), ref.time), fused

    def _computed(self, expr: Expr, axes: list[Expr | None]) -> Node | int:
        """``expr`` with one dimension per axis, of size 1 where it does not depend on it; an int for a number."""
        if not self.space.symbols_of(expr) and not expr.has(Read):
            return self.size(expr)
        for ref in self._sources(expr):
            with contextlib.suppress(Rejected):
                return self._counting(self.view(ref, [[axis] for axis in axes], broadcast=True))
        if expr in self.space.sizes:
            iota = self.call(torch.arange, self.size(self.space.sizes[expr]), device=self.device)
            return self._grouped(iota, [[axis] for axis in axes], {expr}, broadcast=True)
        if isinstance(expr, FloorDiv):
            return self.call(operator.floordiv, *(self._computed(arg, axes) for arg in expr.args))
        if isinstance(expr, sympy.Add | sympy.Mul):
            total, *rest = (self._computed(arg, axes) for arg in sorted(expr.args, key=_tensors_first))
            for part in rest:
                total = self.call(operator.add if isinstance(expr, sympy.Add) else operator.mul, total, part)
            return total
        raise self._unreadable(expr)

    def _counting(self, node: Node) -> Node:
        """An integer tensor in a dtype whose arithmetic does not wrap around."""
        return node if counts(node) else self.call("to", node, torch.int64)

    def _decided(self, formula: Formula, axes: list[Expr | None]) -> Node:
        if isinstance(formula, Truth):
            return self.call(torch.full, [1] * len(axes), formula.value, dtype=torch.bool, device=self.device)
        if isinstance(formula, AtLeastZero):
            terms = sympy.Add.make_args(formula.expr)
            below = sympy.Add(*[term for term in terms if term.could_extract_minus_sign()])
            sides = (self._computed(sympy.expand(side), axes) for side in (formula.expr - below, -below))
            return self.call(operator.ge, *sides)
        if isinstance(formula, Flag):
            for ref in self._sources(formula.read):
                with contextlib.suppress(Rejected):
                    return self.view(ref, [[axis] for axis in axes], broadcast=True)
            raise self._unreadable(formula.read)
        if isinstance(formula, Not):
            return self.call(operator.invert, self._decided(formula.part, axes))
        combine = operator.and_ if isinstance(formula, And) else operator.or_
        total, *rest = (self._decided(part, axes) for part in formula.parts)
        for part in rest:
            total = self.call(combine, total, part)
        return total

    def _sources(self, expr: Expr) -> list[Ref]:
        """Tensors that hold the value of ``expr`` now: the one it reads, then nodes met on the way, innermost first."""
        found = [ref for ref, value in reversed(self.forms) if value == expr and self.fresh(ref)]
        if isinstance(expr, Read):
            node = self.facts.node_of(expr.args[0])
            if self.facts.version(node, self.time) == expr.args[1]:
                found.insert(0, Ref(node, expr.coords, self.time))
        return found

    def _unreadable(self, expr: Expr) -> Rejected:
        if not isinstance(expr, Read):
            return Rejected("layout", f"the index {expr} is not affine")
        node = self.facts.node_of(expr.args[0])
        if self.facts.version(node, self.time) != expr.args[1]:
            return Rejected("written", f"{node.name} changes between its use and {self.before.name}")
        return Rejected("layout", f"{node.name} is read at ({', '.join(map(str, expr.coords))})")

    def _size_among(self, nodes: Iterable[Node], expr: Expr) -> Node | None:
        for node in nodes:
            for dim, size in enumerate(shape_of(node)):
                if equal(size, expr):
                    return self.call("size", node, dim)
        return None

    def _grouped(self, node: Node, groups: Groups, present: set[Any], broadcast: bool) -> Node:
        """Insert the axes of ``groups`` that ``node`` lacks, and merge each group into one dimension."""
        axes = _flat(groups)
        for dim, axis in enumerate(axes):
            if axis not in present:
                node = self.call("unsqueeze", node, dim)
        missing = [axis is not None and axis not in present for axis in axes]
        if any(missing) and not broadcast:
            sizes = [
                self.size(self.space.size_of([axis])) if lacks else -1
                for axis, lacks in zip(axes, missing, strict=True)
            ]
            node = self.call("expand", node, *sizes)
        if any(len(group) > 1 for group in groups):
            sizes, dims = [], iter(shape_of(node))
            for group in groups:
                sizes.append(self.size(sympy.prod([next(dims) for _ in group or [None]])))
            node = self.call("reshape", node, *sizes)
        return node

    def _merged(self, node: Node, groups: Groups) -> Node:
        """Expand one dimension per axis to its size, and merge each group."""
        axes = _flat(groups)
        wanted = [sympy.Integer(1) if axis is None else self.space.size_of([axis]) for axis in axes]
        if not all(equal(have, want) for have, want in zip(shape_of(node), wanted, strict=True)):
            node = self.call("expand", node, *map(self.size, wanted))
        if any(len(group) > 1 for group in groups):
            node = self.call("reshape", node, *(self.size(self.space.size_of(group)) for group in groups))
        return node

    def _example(self, node: Node) -> Any:
        def example(n: Node) -> Any:
            return n.meta["example_value"]

        args, kwargs = map_arg(node.args, example), map_arg(node.kwargs, example)
        with self.facts.fake_mode or contextlib.nullcontext(), torch.no_grad():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function target is callable


def _is_custom(target: Any) -> bool:
    """Whether a call is of an operator outside PyTorch: its result may reach the user, who may change it in place."""
    return isinstance(target, OpOverload) and target.namespace != "aten"


def _hashable(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return (type(value).__name__, value)


def _flat(groups: Groups) -> list[Expr | None]:
    """The axes of all groups in order; None for the size-1 dimension of an empty group."""
    return [axis for group in groups for axis in (group or [None])]


def _tensors_first(expr: Expr) -> tuple[bool, str]:
    """Sort key: Python's operators give a tensor when the left operand is one."""
    return not expr.has(Read), str(expr)
