"""fuse_silu_mul_quantise: ``silu(gate) * up`` and its quantise to 8 bits as one operator.

Rules:
    1. A ``tcport::silu_mul`` that is quantised becomes ``tcport::silu_mul_quantise``; the spellings are those of
       :mod:`tcport.passes.quantise_patterns`. The product is rounded to its dtype first, as in the graph.
    2. Views of the product that keep its rows whole may stand between the two.
    3. Where anything else uses the product, both stay as they are.
    4. What is scaled in 16 bits, or by a tensor of several scales, is left.
    5. A scale per row is the row's largest magnitude over the format's limit, with at most one floor.

Saves: the store and the load of the product, and a kernel. Between the product's operator and generated code nothing
else would: Inductor fuses neither into the other.
"""

from __future__ import annotations

import torch
import torch.fx

from tcport import layer_ops as layer_ops  # defines the operator
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.passes.quantise_patterns import PATTERNS, fuse_behind


@register_pass(
    name="fuse_silu_mul_quantise",
    after=("fuse_silu_mul",),
    before=("select_tiles",),
    requires=(has_values,),
    params=PATTERNS,
)
def fuse_silu_mul_quantise(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Fuse every gated product with its quantise; returns their number."""
    ops = torch.ops.tcport
    return fuse_behind(graph, ctx, ops.silu_mul.default, None, ops.silu_mul_quantise.default)
