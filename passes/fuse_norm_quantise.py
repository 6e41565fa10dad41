"""fuse_norm_quantise: residual sum, RMSNorm and the norm's quantise to 8 bits as one operator.

Rules:
    1. A ``tcport::add_rms_norm`` whose norm is quantised becomes ``tcport::add_rms_norm_quantise``; the spellings are
       those of :mod:`tcport.passes.quantise_patterns`. The norm is rounded to its dtype first, as in the graph.
    2. Views of the norm that keep its rows whole may stand between the two.
    3. The sum may have other users, after the quantise. Where anything else uses the norm, both stay as they are.
    4. What is scaled in 16 bits, or by a tensor of several scales, is left.
    5. A scale per row is the row's largest magnitude over the format's limit, with at most one floor.

Saves: the store and the load of the norm, and a kernel. Between the norm's operator and generated code nothing else
would: Inductor fuses neither into the other.
"""

from __future__ import annotations

import torch
import torch.fx

from tcport import layer_ops as layer_ops  # defines the operator
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.passes.quantise_patterns import PATTERNS, fuse_behind


@register_pass(
    name="fuse_norm_quantise",
    after=("fuse_add_rms_norm",),
    before=("select_tiles",),
    requires=(has_values,),
    params=PATTERNS,
)
def fuse_norm_quantise(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Fuse every norm with its quantise; returns their number."""
    ops = torch.ops.tcport
    return fuse_behind(graph, ctx, ops.add_rms_norm.default, 1, ops.add_rms_norm_quantise.default)
