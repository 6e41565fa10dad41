"""What must still hold after a graph pass: a well-formed graph, true metadata, and every side effect in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from tcport.errors import PassError

Signature = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A graph before a pass.

    Attributes:
        calls: by node, its target, arguments and keyword arguments; a node that differs was changed by the pass.
        effects: the nodes with side effects, in order.
    """

    calls: dict[torch.fx.Node, Signature]
    effects: tuple[torch.fx.Node, ...]

    @staticmethod
    def of(graph: torch.fx.Graph) -> Snapshot:
        """Take the snapshot."""
        return Snapshot({node: _signature(node) for node in graph.nodes}, tuple(filter(has_effect, graph.nodes)))


def check_after(graph: torch.fx.Graph, before: Snapshot, name: str, merged: dict[torch.fx.Node, torch.fx.Node]) -> None:
    """Refuse what a pass must not leave behind, and fill in the metadata of the nodes it inserted.

    Args:
        graph: the graph after the pass. before: its snapshot before.
        name: the pass, for the message.
        merged: nodes with side effects that the pass replaced, and what carries the effect now.

    Raises:
        PassError: names the pass and the node.
    """
    try:
        graph.lint()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise PassError(
            f"Pass {name!r} left a graph that is not well formed: {error}.",
            "Erase a node only when it has no users, and insert new nodes before their first user.",
        ) from error
    _check_effects(graph, before, name, merged)
    for node in graph.nodes:
        if node.op == "call_function" and before.calls.get(node) != _signature(node):
            _check_value(node, name)


def has_effect(node: torch.fx.Node) -> bool:
    """Whether a node writes to one of its arguments, functionalised or not."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    return getattr(node.target, "__name__", "") in ("auto_functionalized", "auto_functionalized_v2")


def _check_effects(
    graph: torch.fx.Graph, before: Snapshot, name: str, merged: dict[torch.fx.Node, torch.fx.Node]
) -> None:
    place = {node: number for number, node in enumerate(graph.nodes)}
    last = -1
    for node in before.effects:
        carrier = node
        while carrier not in place and carrier in merged:
            carrier = merged[carrier]
        if carrier not in place:
            raise PassError(
                f"Pass {name!r} dropped the node {node.name!r} ({node.target}), which writes to its arguments.",
                "Keep it, or say with ctx.merged(old, new) which node carries its effect now.",
            )
        if place[carrier] < last:
            raise PassError(
                f"Pass {name!r} moved the node {carrier.name!r} ({carrier.target}) ahead of an earlier write.",
                "Nodes that write to their arguments keep their order.",
            )
        last = place[carrier]


def _check_value(node: torch.fx.Node, name: str) -> None:
    """Compare a new or changed node's metadata with what its operator says, or fill it in."""
    arguments = list(_fakes(node))
    mode = next((value.fake_mode for value in arguments if hasattr(value, "fake_mode")), None)
    if mode is None:
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with mode:
        derived = node.target(*args, **kwargs)
    stated = node.meta.setdefault("val", derived)
    if _facts(stated) != _facts(derived):
        raise PassError(
            f"Pass {name!r} left the node {node.name!r} ({node.target}) with meta['val'] {_facts(stated)}, but its "
            f"operator gives {_facts(derived)}.",
            "Delete meta['val'] of a node you change (it is derived anew), or give its users what they had before.",
        )


def _fakes(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    for argument in node.all_input_nodes:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            yield value


def _facts(value: Any) -> Any:
    """Shape, dtype and device of the tensors in a value, comparable and printable."""
    if isinstance(value, torch.Tensor):
        return (tuple(map(str, value.shape)), str(value.dtype).removeprefix("torch."), str(value.device))
    if isinstance(value, (tuple, list)):
        return tuple(map(_facts, value))
    return type(value).__name__


def _signature(node: torch.fx.Node) -> Signature:
    return (node.target, node.args, node.kwargs)
