"""Spelling: the canonical operators themselves, which stay as they are and are put on record."""

from __future__ import annotations

import torch
from torch.fx import Node

import tcport.ops  # noqa: F401  defines the operators
from tcport.adapter.graph import GraphFacts
from tcport.adapter.registry import register_matcher
from tcport.adapter.report import Match

_TARGETS = (torch.ops.tcport.paged_attention.default, torch.ops.tcport.kv_write.default)


@register_matcher("canonical", stage="attention", targets=_TARGETS)
def match_canonical(facts: GraphFacts, node: Node) -> Match:
    """Record a call of ``tcport::paged_attention`` or ``tcport::kv_write``."""
    return Match("canonical", node, matcher="canonical")
