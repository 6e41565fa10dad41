"""Ready-made conditions for ``register_pass(requires=..., ensures=...)``: what may be said of a whole graph.

Each takes a graph and returns None where it holds, or the reason why it does not. A condition of one's own is written
the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from tcport.effects import returns_nothing, writes_in_place


def has_values(graph: torch.fx.Graph) -> str | None:
    """Every node that computes something carries ``meta["val"]``."""
    for node in graph.nodes:
        computes = node.op in ("placeholder", "call_function") and not returns_nothing(node)
        if computes and "val" not in node.meta:
            return f"the node {node.name!r} has no meta['val']"
    return None


def functional(graph: torch.fx.Graph) -> str | None:
    """No node writes to its arguments, but for the final copies into graph inputs."""
    for node in graph.nodes:
        if writes_in_place(node) and node.target is not torch.ops.aten.copy_.default:
            return f"the node {node.name!r} ({node.target}) writes to its arguments"
    return None


def tiles_chosen(graph: torch.fx.Graph) -> str | None:
    """Every functional tcport operator carries its chain of kernels in ``meta["tcport"]``."""
    for node in graph.nodes:
        if (
            getattr(node.target, "namespace", "") == "tcport"
            and not writes_in_place(node)
            and "tcport" not in node.meta
        ):
            return f"the node {node.name!r} ({node.target}) has no kernels chosen"
    return None


def has(target: Any) -> Callable[[torch.fx.Graph], str | None]:
    """The condition that a graph calls an operator overload at least once."""

    def holds(graph: torch.fx.Graph) -> str | None:
        return None if graph.find_nodes(op="call_function", target=target) else f"no node calls {target}"

    holds.__name__ = f"has({target})"
    return holds


def lacks(target: Any) -> Callable[[torch.fx.Graph], str | None]:
    """The condition that a graph never calls an operator overload."""

    def holds(graph: torch.fx.Graph) -> str | None:
        found = graph.find_nodes(op="call_function", target=target)
        return f"the node {found[0].name!r} calls {target}" if found else None

    holds.__name__ = f"lacks({target})"
    return holds
