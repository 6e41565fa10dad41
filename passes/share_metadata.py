"""share_metadata: what layers compute alike of a step's lengths, positions and tables is computed once.

Rules:
    1. A node that gives an integer or boolean tensor is dropped where an earlier node gives the same: the same function
       of the same arguments, counting nodes that were shared before as one.
    2. Functions that write, draw random numbers or give memory that is not set are left, and so are numbers of floating
       point: what is shared stays in memory until its last user.
    3. Where what a node gives is a result of the graph, or memory of one, it is left: results that were two tensors
       stay two.
    4. What a functional write writes to is left: the write may come to change it in place.

Saves: a kernel and its store in every layer but one, where a model computes slots, lengths or masks layer by layer: the
operators that read them are opaque to Inductor, which therefore stores each copy.

Runs after the passes that look for patterns: a pattern must have its inner values to itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from tcport.effects import has_effect, writes_functionally
from tcport.functional_write import is_view, memory_of
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass


@register_pass(
    name="share_metadata",
    after=(
        "fuse_add_rms_norm",
        "fuse_int4_matmul",
        "fuse_norm_quantise",
        "fuse_rope_write",
        "fuse_silu_mul",
        "fuse_silu_mul_quantise",
        "merge_kv_write",
    ),
    before=("select_tiles",),
    requires=(has_values,),
)
def share_metadata(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Share every integer or boolean tensor that is computed again; returns the number of nodes that went."""
    kept_apart = _kept_apart(graph)
    first: dict[Any, torch.fx.Node] = {}
    shared = 0
    for node in list(graph.nodes):
        if not _is_metadata(node) or memory_of(node) in kept_apart:
            continue
        earlier = first.setdefault(_key(node), node)
        if earlier is node:
            continue
        if not is_view(node):
            ctx.saved(1, [node.meta["val"]])
        node.replace_all_uses_with(earlier)
        graph.erase_node(node)
        shared += 1
    return shared


def _is_metadata(node: torch.fx.Node) -> bool:
    """Whether a node computes a tensor of integers or booleans from its arguments alone."""
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or has_effect(node):
        return False
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return False
    random = torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
    return not random and not schema.name.startswith("aten::empty")


def _kept_apart(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The memory of results, and of what functional writes may come to change in place."""
    used: list[torch.fx.Node] = []
    for node in graph.nodes:
        if node.op == "output":
            used += node.all_input_nodes
        elif writes_functionally(node):
            used += node.kwargs.get("_all_bases", node.all_input_nodes)  # type: ignore[arg-type]
    return set(map(memory_of, used))


def _key(node: torch.fx.Node) -> tuple[Any, ...]:
    """Equal for nodes that compute the same."""
    return node.target, _hashable(node.args), _hashable(tuple(sorted(node.kwargs.items())))


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, torch.fx.Node):
        return value
    return type(value), str(value)  # as text: 1, 1.0 and True are equal, and not the same argument
