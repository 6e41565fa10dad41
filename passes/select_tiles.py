"""select_tiles: choose the chain of kernels and tiles for every node of a tcport operator.

Rules:
    1. A node that calls a tcport operator gets ``meta["tcport"]``, a :class:`~tcport.lowering.operators.NodeChoice`:
       its spec and the kernels that take it, best first. A pass that runs ``after=("select_tiles",)`` may replace it.
    2. Nodes of equal specs, such as the layers of a model, share one choice.
    3. Nothing else changes.

A mutating operator has its functional form at this stage; where Inductor makes the operator itself of it, without its
metadata, the choice is made again when it is lowered.

Requires: nodes carry ``meta["val"]``. Ensures: nodes of functional tcport operators carry ``meta["tcport"]``.
"""

from __future__ import annotations

import torch
import torch.fx

from tcport.graph_facts import has_values, tiles_chosen
from tcport.graph_pass import PassContext, register_pass
from tcport.lowering.operators import NodeChoice, Operator, call_of_node, choose_for, device_of, operator_of


@register_pass(name="select_tiles", requires=(has_values,), ensures=(tiles_chosen,))
def select_tiles(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Annotate the nodes of tcport's operators; returns how many there were."""
    matches = 0
    chosen: dict[tuple[Operator, torch.device, str], NodeChoice] = {}
    for node in graph.nodes:
        operator = operator_of(node)
        if operator is not None:
            call = call_of_node(operator, node)
            device, spec = device_of(call), operator.spec(call)
            key = operator, device, repr(spec)  # spelled, 1 and 1.0 differ, and everything has a hash
            if key not in chosen:
                chosen[key] = choose_for(operator, spec, ctx.profile(device), ctx.options.kernel)
            node.meta["tcport"] = chosen[key]
            matches += 1
    return matches
