"""Spelling: ``torch.nn.attention.varlen.varlen_attn`` with a block table, torch's own paged attention."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from tcport.adapter.emit import Emitter
from tcport.adapter.graph import GraphFacts
from tcport.adapter.registry import register_matcher
from tcport.adapter.report import Match, Rejected
from tcport.adapter.sizes import tensor_of
from tcport.adapter.stand_in import stand_in

_NAME = "torch_attn._varlen_attn"


@register_matcher("varlen", stage="attention")
def match_varlen(facts: GraphFacts, node: Node) -> Match | None:
    """Match the operator behind ``varlen_attn``; like the canonical one it aligns queries at the end of a sequence."""
    if node.op != "call_function" or str(node.target).removesuffix(".default") != _NAME:
        return None
    args: Any = node.args
    kwargs: Any = node.kwargs
    return _match(node, *args, **kwargs)


def _match(
    node: Node,
    query: Node,
    key: Node,
    value: Node,
    cu_seq_q: Node,
    cu_seq_k: Node | None,
    max_q: Any,
    max_k: Any,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    enable_gqa: bool = False,
    seqused_k: Node | None = None,
    block_table: Node | None = None,
    num_splits: int | None = None,
) -> Match:
    if block_table is None or seqused_k is None:
        raise Rejected("not-paged", f"K is read from {key.name} without a block table")
    results = node.meta.get("example_value")
    if isinstance(results, tuple | list) and results[0].requires_grad:
        raise Rejected("gradient", f"a gradient is recorded through {node.name}; run under torch.inference_mode()")
    used = [user for user in node.users if user.target is operator.getitem]
    if len(used) != len(node.users):
        raise Rejected("layout", f"the results of {node.name} are used as a tuple")
    lse = any(user.args[1] == 1 for user in used)
    options = _visible(node, is_causal, window_size)
    if scale is not None:
        options["scale"] = scale
    if num_splits == 1:
        options |= {"num_splits": 1, "batch_invariant": True}  # what torch promises for one split
    if lse:
        options["return_lse"] = True

    def build(emit: Emitter) -> None:
        both = emit.call(
            torch.ops.tcport.paged_attention.default, query, key, value, block_table, seqused_k, cu_seq_q, **options
        )
        for user in used:
            user.replace_all_uses_with(stand_in(emit, _result(emit, both, user), user))

    return Match("paged_attention", node, build, carried=frozenset(used), matcher="varlen")


def _visible(node: Node, is_causal: bool, window_size: Any) -> dict[str, Any]:
    """``(left, right)`` counts keys on either side of the query's own, -1 without bound; our window counts its own."""
    left, right = window_size if window_size is not None else (-1, -1)
    causal = is_causal or right == 0
    if right > 0 and not causal:
        raise Rejected("mask", f"{node.name} lets a token see {right} later positions")
    options: dict[str, Any] = {} if causal else {"causal": False}
    return options | ({"window": left + 1} if left >= 0 else {})


def _result(emit: Emitter, both: Node, user: Node) -> Node:
    """Result 0 is the output, 1 the LSE ``[heads, tokens]``, 2 the state of a generator that nothing advances."""
    if user.args[1] == 2:
        held = tensor_of(user)
        device = None if held is None else held.device
        return emit.call(torch.zeros, (2,), dtype=torch.uint64, device=device)
    result = emit.call(operator.getitem, both, user.args[1])
    return result if user.args[1] == 0 else emit.call("transpose", result, 0, 1)
