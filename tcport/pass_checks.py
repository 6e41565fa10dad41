"""What must still hold after a graph pass: a well-formed graph, true metadata, and every side effect in its place."""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Callable
from typing import Any

import torch.fx

from tcport.effects import has_effect, writes_functionally, writes_in_place
from tcport.errors import EffectError, MalformedGraphError, NodeValueError, PassResultError
from tcport.graph_pass import PassContext, Stage
from tcport.pass_values import agree, derive, facts, forget_derived

Signature = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A graph before a pass.

    Attributes:
        calls: by node, its target, arguments and keyword arguments; a node that differs was changed by the pass.
        effects: the nodes with side effects, in order.
        used: those of them whose results are used.
        outputs: the values the graph returns.
    """

    calls: dict[torch.fx.Node, Signature]
    effects: tuple[torch.fx.Node, ...]
    used: frozenset[torch.fx.Node]
    outputs: tuple[Any, ...]

    @staticmethod
    def of(graph: torch.fx.Graph, stage: Stage = "functional") -> Snapshot:
        """Take the snapshot."""
        effects = tuple(filter(has_effect, graph.nodes))
        return Snapshot(
            {node: _signature(node) for node in graph.nodes},
            effects,
            frozenset(filter(_is_used, effects)),
            tuple(node.meta.get(value_key(stage)) for node in _outputs(graph)),
        )

    def differs(self, graph: torch.fx.Graph) -> bool:
        """Whether a node of the graph was added, removed or changed since; metadata and order aside."""
        return self.calls != {node: _signature(node) for node in graph.nodes}

    def in_order(self, graph: torch.fx.Graph) -> bool:
        """Whether the nodes of a graph that does not differ are in the order they were in."""
        return all(a is b for a, b in zip(self.calls, graph.nodes, strict=True))


def value_key(stage: Stage) -> str:
    """Where the nodes of a stage's graphs keep their fake value."""
    return "example_value" if stage == "dynamo" else "val"


def check_after(
    graph: torch.fx.Graph, before: Snapshot, name: str, ctx: PassContext, matches: int, stage: Stage = "functional"
) -> None:
    """Refuse what a pass must not leave behind, and fill in the metadata of the nodes it inserted.

    Args:
        graph: the graph after the pass. before: its snapshot before.
        name: the pass, for the message.
        ctx: the pass's context, which was told of merges.
        matches: what the pass returned.
        stage: the pass's stage.

    Raises:
        PassError: of the class that names the cause; its text names the pass and the node.
    """
    if matches == 0 and before.differs(graph):
        raise PassResultError(
            f"Pass {name!r} changed the graph and returned 0.", "Return the number of matches that were rewritten."
        )
    if matches or not before.in_order(graph):
        _check_form(graph, name)
        _check_effects(graph, before, name, ctx)
        for node in graph.nodes:
            if before.calls.get(node) != _signature(node):
                _check_value(node, name, value_key(stage))
                if stage != "dynamo":
                    _check_operator(node, name)
    _check_outputs(graph, before, name, value_key(stage))
    forget_derived(graph)


_exempt: list[Callable[[object], bool]] = []


def exempt(has_code: Callable[[object], bool]) -> None:
    """Let a graph call functions, which are no operators, where a compiler says that it has code for them."""
    _exempt.append(has_code)


def _check_form(graph: torch.fx.Graph, name: str) -> None:
    seen: set[torch.fx.Node] = set()
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument.graph is not graph:
                problem = f"{node.name!r} uses {argument.name!r}, which belongs to another graph"
            elif argument not in seen:
                problem = f"{node.name!r} uses {argument.name!r} before it is computed (the order is wrong or cyclic)"
            else:
                continue
            raise MalformedGraphError(
                f"Pass {name!r} left a graph that is not well formed: {problem}.",
                "Erase a node only when it has no users, and insert new nodes after their inputs and before their "
                "first user.",
            )
        seen.add(node)
    try:
        graph.lint()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise MalformedGraphError(
            f"Pass {name!r} left a graph that is not well formed: {str(error).rstrip('.')}.",
            "Change a graph through torch.fx.Graph's methods alone.",
        ) from error


def _check_effects(graph: torch.fx.Graph, before: Snapshot, name: str, ctx: PassContext) -> None:
    place = {node: number for number, node in enumerate(graph.nodes)}
    last = -1
    for node in before.effects:
        carrier = node if node in place else ctx.carrier(node)
        lost = carrier not in place or (node in before.used and writes_functionally(carrier) and not _is_used(carrier))
        if lost:
            raise EffectError(
                f"Pass {name!r} dropped the node {node.name!r} ({node.target}), which writes to its arguments.",
                "Keep it and the use of its results, or say with ctx.merged(old, new) which node carries its effect "
                "now.",
            )
        if carrier is not node or not writes_in_place(node):
            continue  # a functional write is ordered by the use of its results, a merged one by whoever merged it
        if place[carrier] < last:
            raise EffectError(
                f"Pass {name!r} moved the node {carrier.name!r} ({carrier.target}) ahead of an earlier write.",
                "Nodes that write to their arguments keep their order.",
            )
        last = place[carrier]


def _check_value(node: torch.fx.Node, name: str, key: str) -> None:
    """Compare a new or changed node's metadata with what its operator says, or fill it in."""
    try:
        derived = derive(node, key)
    except Exception as error:
        raise NodeValueError(
            f"Pass {name!r} left the node {node.name!r} ({node.target}), which cannot run on its arguments "
            f"{_arguments(node, key)}: {type(error).__name__}: {str(error).rstrip('.')}.",
            "Give it arguments of the shapes and dtypes that its operator takes.",
        ) from error
    if derived is None:
        return
    stated = node.meta.setdefault(key, derived)
    if not agree(stated, derived):
        raise NodeValueError(
            f"Pass {name!r} left the node {node.name!r} ({node.target}) with meta[{key!r}] {facts(stated)}, but its "
            f"operator gives {facts(derived)}.",
            f"Delete meta[{key!r}] of a node you change (it is derived anew), or give its users what they had before.",
        )


def _check_operator(node: torch.fx.Node, name: str) -> None:
    """Refuse calls that run, operation by operation, and that Inductor has no code for."""
    plain = isinstance(node.target, _PLAIN) and node.target is not operator.getitem
    gives_tensor = isinstance(node.meta.get("val"), torch.Tensor) and not any(has(node.target) for has in _exempt)
    if node.op in ("call_method", "call_module") or (node.op == "call_function" and plain and gives_tensor):
        called = getattr(node.target, "__name__", node.target)
        raise MalformedGraphError(
            f"Pass {name!r} left the node {node.name!r}, which calls {called!r} and no operator.",
            "Call an operator, such as torch.ops.aten.relu.default: torch functions and methods are for passes of the "
            "stage 'dynamo'.",
        )


_PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


def _check_outputs(graph: torch.fx.Graph, before: Snapshot, name: str, key: str) -> None:
    outputs = _outputs(graph)
    if len(outputs) != len(before.outputs):
        raise NodeValueError(
            f"Pass {name!r} changed the number of outputs from {len(before.outputs)} to {len(outputs)}.",
            "Leave the output node as it is; replace what it returns.",
        )
    for number, (node, was) in enumerate(zip(outputs, before.outputs, strict=True)):
        now = node.meta.get(key)
        if was is not None and now is not None and not agree(was, now):
            raise NodeValueError(
                f"Pass {name!r} changed output {number} from {facts(was)} to {facts(now)} (node {node.name!r}).",
                "Give the replacement the shape, strides and dtype of what it replaces, for instance with "
                "aten.as_strided or clone(memory_format=...).",
            )


def _outputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return list(next(node for node in reversed(graph.nodes) if node.op == "output").all_input_nodes)


def _is_used(node: torch.fx.Node) -> bool:
    """Whether anything reads a result of a node; taking it out of a tuple is not yet reading it."""
    return any(user.target is not operator.getitem or user.users for user in node.users)


def _arguments(node: torch.fx.Node, key: str) -> str:
    return ", ".join(f"{argument.name} {facts(argument.meta.get(key))}" for argument in node.all_input_nodes)


def _signature(node: torch.fx.Node) -> Signature:
    return (node.target, node.args, node.kwargs)
