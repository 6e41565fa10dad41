"""split_shared_prefix: pages that all sequences begin with are read once for all, not once for each.

Rules:
    1. A decode step's ``paged_attention`` becomes two and a merge where its block table is, in the graph, a
       concatenation of a row of pages that is expanded over the sequences and of each sequence's own pages.
    2. Its lengths are, in the graph, a sum with a number that covers the shared pages: else a sequence might end within
       them. The other summand is a count of keys, which is not negative; a row of length 0 still gets zeros.
    3. The shared pages hold at least :data:`LEAST_KEYS` keys, and there are at least two sequences; both are known when
       the graph is compiled. Less is not worth the two kernels more.
    4. Windows, chunks, ALiBi, masks and prompts reach into the prefix differently for every token: left. So are calls
       that promise results that do not depend on the batch.
    5. Casts of table and lengths between integer types may stand between.

Saves: of the shared pages, all reads but one. Results differ from those of one kernel by the rounding of a merge.

Runs after ``fuse_rope_write``, which needs the query to have one reader, and before ``merge_kv_write``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tcport.functional_write import named_arguments
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.pass_values import derive

aten = torch.ops.aten
_ATTENTION = torch.ops.tcport.paged_attention.default
_CAST = torch.ops.prims.convert_element_type.default
_PER_TOKEN = ("cu_seqlens_q", "window", "alibi_slopes", "mask", "chunk")
LEAST_KEYS = 512
"""Keys of a prefix from which it is read on its own; estimated, not measured."""


@register_pass(
    name="split_shared_prefix",
    after=("fuse_rope_write",),
    before=("merge_kv_write", "select_tiles"),
    requires=(has_values,),
)
def split_shared_prefix(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Split every attention over a prefix that the graph itself shares; returns their number."""
    matches = 0
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        arguments = named_arguments(node)
        parts = _table_parts(arguments["block_table"])
        if parts is None:
            continue
        reason = _obstacle(arguments, *parts)
        if reason is not None:
            ctx.leave(node, reason)
            continue
        _split(graph, node, arguments, *parts)
        prefix, value = parts[0].meta["val"], arguments["k_cache"].meta["val"]
        sequences, keys = arguments["seq_lens"].meta["val"].shape[0], prefix.shape[-1] * value.shape[1]
        ctx.note(f"{keys} keys that {sequences} sequences share are read once")
        matches += 1
    return matches


def _behind_casts(node: torch.fx.Node) -> torch.fx.Node:
    while node.target is _CAST and not node.meta["val"].is_floating_point():
        node = node.args[0]  # type: ignore[assignment]
    return node


def _table_parts(table: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The shared row of a table, ``[P]`` or ``[1, P]``, and the pages of its own that each sequence has, ``[B, M]``."""
    cat = _behind_casts(table)
    if cat.target is not aten.cat.default or len(cat.args[0]) != 2 or cat.args[1:] not in ((1,), (-1,)):  # type: ignore[arg-type]
        return None
    expanded, own = cat.args[0]  # type: ignore[misc]
    if expanded.target not in (aten.expand.default, aten.repeat.default):  # type: ignore[union-attr]
        return None
    row = expanded.args[0]  # type: ignore[union-attr]
    shape, whole = row.meta["val"].shape, expanded.meta["val"].shape  # type: ignore[union-attr]
    once = len(shape) == 1 or (len(shape) == 2 and statically_known_true(shape[0] == 1))
    return (row, own) if once and statically_known_true(shape[-1] == whole[1]) else None  # type: ignore[return-value]


def _obstacle(arguments: dict[str, Any], row: torch.fx.Node, own: torch.fx.Node) -> str | None:
    """Why an attention stays whole; None where it need not."""
    for name in _PER_TOKEN:
        if arguments[name] is not None:
            return f"its {name} differs from token to token"
    if arguments["batch_invariant"]:
        return "it is to give the same in every batch"
    keys = row.meta["val"].shape[-1] * arguments["k_cache"].meta["val"].shape[1]
    if not statically_known_true(keys >= LEAST_KEYS):
        return f"its shared pages are not known to hold {LEAST_KEYS} keys"
    if not statically_known_true(own.meta["val"].shape[0] >= 2):
        return "it is not known to have two sequences"
    if not statically_known_true(own.meta["val"].shape[1] >= 1):
        return "its sequences are not known to have pages of their own"
    lens = _behind_casts(arguments["seq_lens"])
    added = lens.args[1] if lens.target is aten.add.Tensor and len(lens.args) == 2 and not lens.kwargs else None
    if isinstance(added, torch.fx.Node):
        added = added.meta.get("val")
    if not isinstance(added, (int, torch.SymInt)) or not statically_known_true(added >= keys):
        return "its lengths are not known to cover the shared pages"
    return None


def _split(
    graph: torch.fx.Graph, node: torch.fx.Node, arguments: dict[str, Any], row: torch.fx.Node, own: torch.fx.Node
) -> None:
    """Put the two attentions and their merge in the place of one."""

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta["val"] = derive(made)
        return made

    def attend(table: torch.fx.Node, lens: torch.fx.Node, **changes: Any) -> list[torch.fx.Node]:
        given = {**arguments, "block_table": table, "seq_lens": lens, "return_lse": True, **changes}
        names = [argument.name for argument in _ATTENTION._schema.arguments if not argument.kwarg_only]
        rest = {name: value for name, value in given.items() if name not in names}
        both = call(_ATTENTION, *(given[name] for name in names), **rest)
        return [call(operator.getitem, both, place) for place in range(2)]

    query, lens = arguments["query"], arguments["seq_lens"]
    table_dtype, lens_dtype = (arguments[name].meta["val"].dtype for name in ("block_table", "seq_lens"))
    device = lens.meta["val"].device
    with graph.inserting_before(node):
        if row.meta["val"].dim() == 1:
            row = call(aten.unsqueeze.default, row, 0)
        pages, page = (call(aten.sym_size.int, of, 1) for of in (row, arguments["k_cache"]))
        keys, tokens = call(operator.mul, pages, page), call(aten.sym_size.int, query, 0)
        row, own = (call(_CAST, part, table_dtype) for part in (row, own))
        rest = attend(own, call(aten.relu.default, call(aten.sub.Tensor, lens, keys)))  # none of a row of length 0
        whole = call(aten.full.default, [1], keys, dtype=lens_dtype, device=device, pin_memory=False)
        count = call(aten.full.default, [1], tokens, dtype=lens_dtype, device=device, pin_memory=False)
        starts = call(aten.cat.default, [call(aten.sub.Tensor, count, tokens), count])
        prefix = attend(row, whole, cu_seqlens_q=starts, causal=False, sinks=None)
        live = call(aten.unsqueeze.default, call(aten.gt.Scalar, lens, 0), 1)
        nothing = call(aten.full.default, [1, 1], -torch.inf, dtype=torch.float32, device=device, pin_memory=False)
        seen = call(aten.where.self, live, prefix[1], nothing)
        merged = call(torch.ops.tcport.merge_states.default, prefix[0], seen, *rest)
        taken = {user: call(operator.getitem, merged, user.args[1]) for user in node.users}
    for old, new in taken.items():
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    graph.erase_node(node)
