"""merge_kv_write: make one operator of a cache write and the attention that reads the cache after it.

Rules:
    1. A ``kv_write`` and a ``paged_attention`` become ``write_and_attend`` where the attention's K and V are the very
       views that were written: same memory, shape, strides and offset, and the same scales.
    2. The merged node stands where the attention stood. Where anything else reads the written cache before that, both
       stay as they are.
    3. Of several attentions over one write the first is merged; the others read what the merged node has written.
    4. Where ``options["kernel"]`` names a kernel, it is the one that half uses.

Saves: the copies of whole caches that Inductor makes where it cannot see that write and read may share memory.

Requires: the functional form of the write. Ensures: every write is still in the graph, alone or merged.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from tcport.functional_write import FunctionalWrite, is_view, memory_of, named_arguments, written_by
from tcport.fused_ops import WRITE_ARGUMENTS
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.pass_values import agree, derive, fake_mode

_CACHES = ("k_cache", "v_cache")
_NUM_RESULTS = 2
"""Results of the merged operator, ``out`` and ``lse``, before the new versions of the bases."""


@register_pass(name="merge_kv_write", before=("select_tiles",), requires=(has_values,))
def merge_kv_write(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Merge every write with the first attention over what it wrote; returns the number of pairs."""
    matches = 0
    for node in list(graph.nodes):
        if node.target is not torch.ops.tcport.paged_attention.default:
            continue
        arguments = named_arguments(node)
        write = written_by(arguments["k_cache"])
        if write is None:
            continue
        reason = _obstacle(write, node, arguments)
        if reason is not None:
            ctx.leave(node, reason)
            continue
        ctx.merged(write.node, _merge(graph, write, node, arguments))
        matches += 1
    return matches


def _obstacle(write: FunctionalWrite, attention: torch.fx.Node, arguments: dict[str, Any]) -> str | None:
    """Why a write and an attention cannot be merged; None where they can."""
    bases = [new.meta["val"] if (new := write.new_base(i)) else None for i in range(len(write.bases))]
    for name in _CACHES:
        if memory_of(arguments[name]) is not write.new_base(write.base_index(name)):
            return f"its {name} was not written by {write.node.name}"
        with fake_mode(write.node.graph):
            written = write.view(name, bases, _run)
        read = arguments[name].meta["val"]
        if not (agree(written, read) and agree(written.storage_offset(), read.storage_offset())):
            return f"its {name} is another view than {write.node.name} wrote to"
    for name in ("k_scale", "v_scale"):
        if write.node.kwargs.get(name) is not arguments.get(name):
            return f"it reads with another {name} than {write.node.name} wrote with"
    order = {node: number for number, node in enumerate(write.node.graph.nodes)}
    for reader in _readers(write.node):
        if reader is not attention and order[reader] < order[attention]:
            return f"{reader.name} reads the cache between {write.node.name} and it"
    return None


def _merge(
    graph: torch.fx.Graph, write: FunctionalWrite, attention: torch.fx.Node, arguments: dict[str, Any]
) -> torch.fx.Node:
    """Put the merged node in the place of the attention; returns it."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    earlier_views = [view for view in _views(write.node) if order[view] < order[attention]]
    plain = {name: value for name, value in write.plain_arguments().items() if name in WRITE_ARGUMENTS}
    plain |= {name: value for name, value in arguments.items() if name not in _CACHES}
    with graph.inserting_before(attention):
        merged = graph.call_function(
            torch.ops.higher_order.auto_functionalized_v2,
            (torch.ops.tcport.write_and_attend.default,),
            {**plain, **write.view_arguments()},
        )
        taken = {user: graph.call_function(operator.getitem, (merged, user.args[1])) for user in attention.users}
        for index in range(len(write.bases)):
            if (old := write.new_base(index)) is not None:
                taken[old] = graph.call_function(operator.getitem, (merged, _NUM_RESULTS + index))
    merged.meta["val"] = derive(merged)
    for old, new in taken.items():
        new.meta["val"] = derive(new)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    graph.erase_node(attention)
    # The other readers of the cache come after the attention, and so must the views through which they read.
    cursor = list(taken.values())[-1]
    for view in earlier_views:
        if view not in taken:
            cursor.append(view)
            cursor = view
    for view in reversed(earlier_views):
        if view not in taken and not view.users:
            graph.erase_node(view)
    graph.erase_node(write.node)
    return merged


def _views(write: torch.fx.Node) -> list[torch.fx.Node]:
    """The new bases of a write and every view of them, in the graph's order."""
    found = {user for user in write.users if user.target is operator.getitem}
    for node in write.graph.nodes:
        source = node.args[0] if node.args else None
        if source in found and (is_view(node) or (node.target is operator.getitem and is_view(source))):
            found.add(node)
    return [node for node in write.graph.nodes if node in found]


def _readers(write: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that read what a write has written."""
    views = _views(write)
    return [user for view in views for user in view.users if user not in views]


def _run(overload: Any, *args: Any) -> Any:
    return overload(*torch.fx.map_arg(args, lambda node: node.meta["val"]))
