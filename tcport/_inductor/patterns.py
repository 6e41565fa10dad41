"""Patterns over Inductor's matcher.

Inductor traces a function into a tree of pattern expressions and matches it at a node. Added here: operands in either
order, with backtracking; no-op views between the parts; and constants that are compared, symbolic sizes included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import (
    CallFunction,
    FailedMatch,
    Ignored,
    KeywordArg,
    Match,
    MatchContext,
    PatternExpr,
    PatternPrettyPrinter,
    fx_to_pattern,
)
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tcport.errors import PatternError
from tcport.no_ops import innermost
from tcport.pattern import Wildcard

aten = torch.ops.aten
_COMMUTATIVE = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
}
_WITH_NUMBER = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div", "eq", "ne")
}
"""Operations that differ from another in taking a plain number alone."""

_SAME = {**_WITH_NUMBER, aten.reshape.default: aten.view.default}
"""Operations by the one they are compared as. Inductor makes reshapes of a graph's views before passes see it."""

_OTHER = "another operation"
_TRIES = 4096
"""Orders of operands tried at one node; patterns of a dozen commutative operations stay far below."""


def search(outputs: Sequence[PatternExpr], node: torch.fx.Node) -> Match | str:
    """The first match at a node over all orders of operands, or why there is none."""
    script: list[int] = []
    reason = _OTHER
    for _ in range(_TRIES):
        attempt = _Search(outputs, node.graph, script)
        try:
            match = attempt.match(outputs[-1], node)
        except FailedMatch as error:
            match = error
        if match:
            return match  # type: ignore[return-value]
        reason = str(match) if reason == _OTHER else reason  # of all orders, one that came further tells more
        script = list(attempt.taken)
        while script and script[-1] == 1:
            script.pop()
        if not script:
            return reason
        script[-1] = 1
    return f"more than {_TRIES} orders of operands"


def python_of(tree: PatternExpr, name: str) -> str:
    """A pattern as Python."""
    return PatternPrettyPrinter.run(tree, output_name=name)


@contextlib.contextmanager
def fresh_fake_mode() -> Iterator[None]:
    """Fake tensors of their own, also within a compile."""
    with unset_fake_temporarily(), FakeTensorMode():
        yield


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], sizes_as_constants: bool = True
) -> torch.fx.GraphModule:
    """The ATen operations of a function, decomposed as Inductor decomposes a graph; numbers are written into it.

    Args:
        sizes_as_constants: symbolic sizes are written as the expressions they are, which is how they are compared.
    """
    holes = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(arguments)
        for i, value in zip(holes, tensors, strict=True):
            filled[i] = value
        return function(*filled)

    with torch.no_grad():
        # New tensors, as one that is given twice would be traced as one.
        tensors = [arguments[i].new_empty_strided(arguments[i].shape, arguments[i].stride()) for i in holes]
        gm = make_fx(run, decomposition_table=select_decomp_table())(*tensors)
    _functionalise(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and (same := innermost(node)) is not node:
            node.replace_all_uses_with(same)
    gm.graph.eliminate_dead_code()
    for node in gm.graph.nodes:
        if sizes_as_constants and node.target in (aten.view.default, aten.reshape.default):
            node.args = (node.args[0], list(node.meta["val"].shape))  # no size is left to be inferred, a -1
        if sizes_as_constants and node.op != "output":
            node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), _size_or_node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


class Computed(float):
    """A constant of a traced pattern that is computed from its numbers, and so another one in each match."""


def mark_computed(gm: torch.fx.GraphModule, again: torch.fx.GraphModule, numbers: Collection[float]) -> None:
    """Make :class:`Computed` of the constants that are others in a trace with other numbers, the numbers aside.

    Raises:
        ValueError: the other trace has other operations.
    """
    for node, other in zip(gm.graph.nodes, again.graph.nodes, strict=True):
        theirs = iter(tree_leaves((other.args, other.kwargs)))

        def marked(value: Any, theirs: Iterator[Any] = theirs) -> Any:
            differs = next(theirs) != value and isinstance(value, float) and value not in numbers
            return Computed(value) if differs else value

        if node.op == "call_function":
            node.args, node.kwargs = tree_map(marked, (node.args, node.kwargs))


def expressions(
    gm: torch.fx.GraphModule,
    names: Sequence[str],
    wildcards: dict[str, Wildcard],
    ignored: tuple[type, ...],
    numbers: dict[str, float],
    spelling: str,
) -> tuple[PatternExpr, ...]:
    """The trees of a traced spelling's results.

    Args:
        ignored: types of constants that are not compared. numbers: the constants that stand for wildcards.
    """
    tensors = [name for name in names if wildcards[name].dims is not None]
    returned = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    several = isinstance(returned, (tuple, list))
    tree = fx_to_pattern(gm, ignore_types=ignored, argnames=tensors, scalar_workaround=numbers)
    outputs = tuple(tree.outputs) if several and hasattr(tree, "outputs") else (tree,)  # type: ignore[attr-defined]
    memo: dict[int, Any] = {}
    tolerant = tuple(_tolerant(output, wildcards, memo) for output in outputs)
    parts = list(_parts(tolerant[-1]))
    within, present = set(map(id, parts)), {part.name for part in parts if isinstance(part, _Wild)}
    if absent := [number for number in numbers if number not in present]:
        raise PatternError(
            f"The pattern {spelling} has no constant that is {absent[0]}.",
            f"Let {absent[0]} stand in it as it is, too; or make what is computed from it a number() of its own.",
        )
    if not isinstance(tolerant[-1], _Call) or any(id(output) not in within for output in tolerant):
        raise PatternError(
            f"The pattern {spelling} returns a value that its last result is not computed from.",
            "Return the values in the order of their computation, the last computed from all others.",
        )
    return tolerant


def _functionalise(graph: torch.fx.Graph) -> None:
    """Make ``add`` of ``add_``: decompositions update their own intermediate values, which a functional graph does not.

    ``torch.func.functionalize`` does nothing within a compile, where patterns are traced.
    """
    later: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("call_function", "output"):
            node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: later.get(n, n))
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name.startswith("aten::") and schema.name.endswith("_") and schema.is_mutable:
            packet = getattr(aten, schema.name.removeprefix("aten::")[:-1])
            node.target = getattr(packet, schema.overload_name or "default")
            later[node.args[0]] = node


def _size_or_node(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return value if isinstance(value, (int, float, torch.SymInt)) else node


def _tolerant(expression: Any, wildcards: dict[str, Wildcard], memo: dict[int, Any]) -> Any:
    """An expression of Inductor's as one that tolerates what may differ; shared parts stay shared."""
    if isinstance(expression, (tuple, list)):
        return type(expression)(_tolerant(item, wildcards, memo) for item in expression)
    if not isinstance(expression, PatternExpr):
        return expression
    if id(expression) not in memo:
        made: Any = expression
        if isinstance(expression, CallFunction):
            made = _Call(
                _SAME.get(expression.fns[0], expression.fns[0]),
                *(_tolerant(a, wildcards, memo) for a in expression.args),
                _users=expression.users,
                **{name: _tolerant(a, wildcards, memo) for name, a in expression.kwargs.items()},
            )
        elif isinstance(expression, KeywordArg):
            made = _Wild(expression.name, wildcards[expression.name])
        memo[id(expression)] = made
    return memo[id(expression)]


def _parts(expression: Any) -> Iterator[Any]:
    yield expression
    if isinstance(expression, _Call):
        for part in expression.flat_args_kwargs[0]:
            yield from _parts(part)


class _Search(MatchContext):
    """One attempt, which follows a script of choices and takes the first option beyond its end."""

    def __init__(self, outputs: Sequence[PatternExpr], graph: torch.fx.Graph, script: Sequence[int]) -> None:
        super().__init__(list(outputs), graph=graph)
        self.script = script
        self.taken: list[int] = []

    def flips(self) -> bool:
        """Whether this time the operands are taken in the other order."""
        number = len(self.taken)
        self.taken.append(self.script[number] if number < len(self.script) else 0)
        return bool(self.taken[-1])


class _Wild(KeywordArg):
    """A wildcard of a kind."""

    def __init__(self, name: str, wildcard: Wildcard) -> None:
        super().__init__(name)
        self.wildcard = wildcard

    def pretty_print(self, pp: Any) -> str:
        return self.name

    def _match(self, node: Any, ctx: MatchContext) -> Any:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else node
        if self.wildcard.dims is None:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        else:
            fits = isinstance(node, torch.fx.Node) and isinstance(value, torch.Tensor)
        if not fits:
            return FailedMatch(f"{self.name} cannot be this")
        return Match(ctx, self, kwargs={self.name: innermost(node) if isinstance(node, torch.fx.Node) else node})


class _Call(CallFunction):
    """A call whose operands may be commuted, behind views that do nothing."""

    def pretty_print(self, pp: Any) -> str:
        return super().pretty_print(pp).replace("_Call(", "CallFunction(", 1)

    def _match(self, node: Any, ctx: MatchContext) -> Any:
        assert isinstance(ctx, _Search)
        if not isinstance(node, torch.fx.Node) or _SAME.get(node.target, node.target) is not self.fns[0]:
            return FailedMatch(_OTHER)
        target = aten.view.default if node.target is aten.reshape.default else node.target
        ours, theirs = _arguments(self.fns[0], self.args, self.kwargs), _arguments(target, node.args, node.kwargs)
        if target is aten.view.default:
            theirs["size"] = list(node.meta["val"].shape)
        if self.fns[0] in _COMMUTATIVE and ours["self"] is not ours["other"] and ctx.flips():
            theirs["self"], theirs["other"] = theirs["other"], theirs["self"]
        match = Match(ctx, self)
        match.nodes.append(node)
        for name, expected in ours.items():
            if isinstance(expected, Ignored):
                continue
            (parts, spec), (values, spec_of_values) = _flat(expected), _flat(theirs[name])
            if spec != spec_of_values:
                return FailedMatch(f"{node.name} has {name}={theirs[name]}, not {expected}")
            for part, value in zip(parts, values, strict=True):
                if isinstance(part, PatternExpr):
                    child = ctx.match(part, innermost(value) if isinstance(value, torch.fx.Node) else value)
                    if not isinstance(child, Match):
                        return child
                    match.extend(child)
                elif not _is_constant(name, part, value, node):
                    return FailedMatch(f"{node.name} has {name}={theirs[name]}, not {expected}")
        return match


def _arguments(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of an operator by name, defaults included."""
    schema = getattr(target, "_schema", None)
    if schema is None:  # operator.getitem
        return {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def _flat(value: Any) -> tuple[list[Any], Any]:
    leaves, spec = tree_flatten(tuple(value) if isinstance(value, (tuple, list)) else value)
    return leaves, spec


def _is_constant(name: str, expected: Any, value: Any, node: torch.fx.Node) -> bool:
    """Whether a constant is the expected one; a dimension may be counted from either end."""
    if isinstance(expected, Ignored):
        return True
    value = value.meta.get("val") if isinstance(value, torch.fx.Node) else value
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return expected is value
    numbers = (int, float, torch.SymInt)
    if not isinstance(expected, numbers) or not isinstance(value, numbers):
        return type(expected) is type(value) and expected == value
    if name in ("dim", "dims", "dim0", "dim1") and (rank := _rank(node)) is not None:
        expected, value = expected % rank, value % rank
    return bool(statically_known_true(expected == value))


def _rank(node: torch.fx.Node) -> int | None:
    """Dimensions that an operation counts its ``dim`` in."""
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    return value.dim() + (node.target is aten.unsqueeze.default)
