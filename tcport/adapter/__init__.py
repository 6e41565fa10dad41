"""The TritonIRAdapter: paged attention, however it is spelled, rewritten to the canonical operators.

:func:`adapt` takes the graph that Dynamo hands to a backend, before AOTAutograd: there attention is still one call or a
few, and masks are still written as the model's author wrote them. That graph is not functional, so every match is also
checked against what is written between the original reads and the canonical call.

How it works: a matcher (one file per spelling: ``sdpa``, ``softmax``, ``varlen``, ``writes``, ``canonical``) describes
the anchor node element by element. :mod:`~tcport.adapter.reader` follows each element back through views and gathers;
:mod:`~tcport.adapter.algebra` brings the coordinates into one form, in which all spellings of a gather are equal;
:mod:`~tcport.adapter.masks` reads the visibility formula; :mod:`~tcport.adapter.attention` finds the role of every
coordinate; :mod:`~tcport.adapter.call` builds the call; :mod:`~tcport.adapter.commit` carries it out.

Differences from the graph that are accepted, all outside what a paged cache holds when it is used rightly:

* A row that sees no key gives zeros; softmax in PyTorch gives NaN, or an average when the mask is finite.
* Slots past a length are never read; in PyTorch a NaN there reaches the output even though it is masked.
* A negative slot is skipped by ``kv_write``; in PyTorch it wraps around and overwrites a slot at the end of the cache.
  A slot past the end is skipped; PyTorch raises. Two tokens in one slot: unspecified in both.
* A table entry below the length must be a page id; in PyTorch a negative one wraps around.
* An integer input that is a length as it stands, from which causality, a window or a chunk is counted, is at most what
  the table holds; in PyTorch the mask is cut there. Anything computed from inputs may lie past it.
* Products, softmax and sums are computed in fp32, whatever dtype the graph computes them in.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from tcport.adapter import canonical as canonical  # registers its matcher, as do the next lines
from tcport.adapter import sdpa as sdpa
from tcport.adapter import softmax as softmax
from tcport.adapter import varlen as varlen
from tcport.adapter import writes as writes
from tcport.adapter.commit import commit
from tcport.adapter.graph import GraphFacts
from tcport.adapter.registry import (
    STAGES,
    Matcher,
    register_matcher,
    registered_matchers,
    unregister_matcher,
)
from tcport.adapter.report import RULES, AdapterReport, Match, Rejected, Rejection

__all__ = [
    "RULES",
    "AdapterReport",
    "Match",
    "Matcher",
    "Rejected",
    "Rejection",
    "adapt",
    "register_matcher",
    "registered_matchers",
    "unregister_matcher",
]


def adapt(gm: GraphModule, matchers: Sequence[Matcher] | None = None) -> AdapterReport:
    """Rewrite paged attention and cache writes to ``tcport::paged_attention`` and ``tcport::kv_write``, in place.

    Args:
        gm: a graph as Dynamo hands it to a backend: torch functions and methods, fake tensors as ``example_value``.
            Rewritten nodes keep ``example_value``, ``stack_trace`` and ``custom``.
        matchers: spellings to look for; None: all that are registered.

    Returns:
        What was rewritten, and for every attention-like node that was not, the rule that it broke and why.
    """
    chosen = registered_matchers() if matchers is None else tuple(matchers)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    records: list[Match | Rejection] = []
    for stage in STAGES:
        facts = GraphFacts(gm)
        ask = [matcher for matcher in chosen if matcher.stage == stage]
        matches: list[Match] = []
        for node in facts.nodes:
            found = _ask(facts, node, ask)
            if isinstance(found, Match):
                matches.append(found)
            elif found is not None:
                records.append(found)
        records += commit(gm, facts, matches) if matches else []
    records.sort(key=lambda record: order.get(record.node, len(order)))
    return AdapterReport(tuple(records))


def _ask(facts: GraphFacts, node: Node, matchers: Sequence[Matcher]) -> Match | Rejection | None:
    """The first match for a node; else the first reason why there is none."""
    refusal: Rejection | None = None
    for matcher in matchers:
        if not matcher.wants(node):
            continue
        try:
            found = matcher.match(facts, node)
        except Rejected as rejected:
            found = Rejection(node, rejected.rule, rejected.reason, matcher.name)
        if isinstance(found, Match):
            return found
        refusal = refusal or found
    return refusal
