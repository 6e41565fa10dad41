"""write_in_place: write into the caller's cache itself, not into a copy of it.

Rules:
    1. The functional form of a ``kv_write``, ``write_and_attend`` or ``rope_and_write`` becomes the operator itself.
    2. It writes to a base itself where the base is (a view of) a graph input that the graph copies the result back into
       at its end, and where from the write on nothing reads the input as it was before: no view of it, no other
       argument of the write, no other base.
    3. It writes to a clone of every other base, and the report says why.
    4. Where the copy at the end has nothing left to do, it goes. A result that is what was written gets a clone: a
       graph never returns its own inputs.
    5. A view that is counted from the start of a storage of which the base is only a part is left to Inductor.

Saves: a copy of the whole cache wherever Inductor cannot prove that none is needed. It takes two halves of one storage
that are passed as two inputs for one another, and under ``dynamic=True`` writes the copy of the second past its end
(pytorch#139628); and where a clone of an argument was dropped, it writes to the original (pytorch#198031).

Requires: that Inductor's own functional passes have run. They drop a clone of which they see no write to the original,
and would drop a snapshot of the cache that was made before the write.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from tcport.functional_write import FunctionalWrite, aliases_of, memory_of
from tcport.graph_pass import PassContext, register_pass
from tcport.pass_values import agree, derive

_COPY = torch.ops.aten.copy_.default


@register_pass(name="write_in_place", stage="inplace")
def write_in_place(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Rewrite every write; returns their number."""
    ops = [getattr(torch.ops.tcport, name).default for name in ("kv_write", "write_and_attend", "rope_and_write")]
    rewritten = 0
    for node in list(graph.nodes):
        write = FunctionalWrite.of(node, *ops)
        if write is None:
            continue
        reason = _unknown_place(write)
        if reason is not None:
            ctx.leave(node, reason)
            continue
        obstacles = {index: _obstacle(write, index) for index in range(len(write.bases))}
        for index, reason in obstacles.items():
            if reason is not None:
                ctx.leave(node, f"writes to a clone of {write.bases[index].name}, because {reason}")
            else:
                ctx.saved(1, [write.bases[index].meta["val"]])
        ctx.merged(node, _rewrite(graph, write, {i for i, reason in obstacles.items() if reason is not None}))
        rewritten += 1
    if rewritten:
        for copy in graph.find_nodes(op="call_function", target=_COPY):
            _drop_if_idle(graph, copy, ctx)
        _return_no_input(graph)
    return rewritten


def _unknown_place(write: FunctionalWrite) -> str | None:
    """Why an argument cannot be made from its base at this stage; None where all can."""
    for name in write.mutated:
        base = write.bases[write.base_index(name)]
        offset = base.meta["val"].storage_offset()
        is_start = base.op == "placeholder" and isinstance(offset, int) and offset == 0
        if write.counts_from_storage(name) and not is_start:
            return f"{name} lies at an offset from the start of a storage of which {base.name} is a part"
    return None


def _obstacle(write: FunctionalWrite, index: int) -> str | None:
    """Why a base cannot be written to itself; None where it can."""
    graph, memory = write.node.graph, memory_of(write.bases[index])
    if memory.op != "placeholder":
        return f"{memory.name} is not an input of the graph"
    copies = {copy.args[0]: copy for copy in graph.find_nodes(op="call_function", target=_COPY)}
    if memory not in copies:
        return f"the graph does not change its input {memory.name}"
    others = [i for i, base in enumerate(write.bases) if i != index and memory_of(base) is memory]
    if others and memory_of(copies[memory].args[1]) is not write.new_base(index):  # type: ignore[arg-type]
        return f"the version of {memory.name} that stays is another one"
    order = {node: number for number, node in enumerate(graph.nodes)}
    for alias in aliases_of(memory):
        for reader in alias.users:
            if memory_of(reader) is memory or reader is copies[memory] or order[reader] < order[write.node]:
                continue
            if reader is write.node and alias in write.bases and not _reads(write, alias):
                continue
            return f"{reader.name} reads {memory.name} as it was before"
    return None


def _reads(write: FunctionalWrite, alias: torch.fx.Node) -> bool:
    """Whether a write reads a tensor through an argument that it does not write to."""
    found: list[Any] = []
    torch.fx.map_arg(write.plain_arguments(), found.append)
    return alias in found


def _rewrite(graph: torch.fx.Graph, write: FunctionalWrite, cloned: set[int]) -> torch.fx.Node:
    """Put the operator itself in the place of its functional form; returns it.

    Args:
        cloned: the indices of the bases of which it writes to a clone.
    """

    def call(overload: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(overload, args)
        node.meta["val"] = derive(node)
        return node

    with graph.inserting_before(write.node):
        clone = torch.ops.aten.clone.default
        bases = [call(clone, base) if index in cloned else base for index, base in enumerate(write.bases)]
        caches = {name: write.view(name, bases, call) for name in write.mutated}
        in_place = graph.call_function(write.op, (), {**write.plain_arguments(), **caches})
        in_place.meta["val"] = derive(in_place)
        if "tcport" in write.node.meta:
            in_place.meta["tcport"] = write.node.meta["tcport"]
        count = len(write.op._schema.returns)
        for number in range(count):
            if (old := write.result(number)) is not None:
                old.replace_all_uses_with(call(operator.getitem, in_place, number) if count > 1 else in_place)
                graph.erase_node(old)
    for index, base in enumerate(bases):
        if (new := write.new_base(index)) is not None:
            new.replace_all_uses_with(base)
            graph.erase_node(new)
    graph.erase_node(write.node)
    return in_place


def _return_no_input(graph: torch.fx.Graph) -> None:
    """Return clones where views of inputs would be returned; what the user gets would change with the next write."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for result in output.all_input_nodes:
        if result.op == "call_function" and memory_of(result).op != "placeholder":
            continue
        if not any(_writes(node, memory_of(result)) for node in graph.nodes if node.op == "call_function"):
            continue
        with graph.inserting_before(output):
            clone = graph.call_function(torch.ops.aten.clone.default, (result,))
        clone.meta["val"] = derive(clone)
        output.replace_input_with(result, clone)


def _drop_if_idle(graph: torch.fx.Graph, copy: torch.fx.Node, ctx: PassContext) -> None:
    """Erase a copy of an input into itself."""
    target, source = copy.args[0], copy.args[1]
    if memory_of(source) is not target or copy.users:  # type: ignore[arg-type]
        return
    was, now = target.meta["val"], source.meta["val"]  # type: ignore[union-attr]
    if agree(was, now) and agree(was.storage_offset(), now.storage_offset()):
        order = {node: number for number, node in enumerate(graph.nodes)}
        users = (user for alias in aliases_of(target) for user in alias.users)  # type: ignore[arg-type]
        writers = [node for node in users if node.op == "call_function" and _writes(node, target)]
        ctx.merged(copy, max(writers, key=order.__getitem__))
        graph.erase_node(copy)


def _writes(node: torch.fx.Node, memory: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and schema.is_mutable
        and node.target is not _COPY
        and any(memory_of(argument) is memory for argument in node.all_input_nodes)
    )
