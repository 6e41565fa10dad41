"""``options={"level": "attention"}``: tcport's operators run their chains, everything else stays eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from tcport import chain
from tcport.chain import screened
from tcport.describe import node_report
from tcport.device import device_profile
from tcport.lowering.operators import Operator, call_of_node, choose, device_of, operator_of
from tcport.options import Options
from tcport.report import GraphReport


def attention_only(gm: torch.fx.GraphModule, options: Options, report: GraphReport) -> Callable[..., Any]:
    """Make the calls of tcport's operators obey the options; the rest of the graph runs as Dynamo captured it.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
    """
    report.notes.append("level='attention': everything but attention and cache writes runs eagerly")
    for node in gm.graph.nodes:
        operator = operator_of(node)
        if operator is not None:
            call = call_of_node(operator, node, "example_value")
            choice = choose(operator, call, device_profile(device_of(call)), options.kernel)
            screened(choice, node=node.name, strict=options.strict)
            report.nodes.append(node_report(node, choice))
            node.target = _bound(operator, options)
    gm.recompile()
    return gm.forward


def _bound(operator: Operator, options: Options) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        call = operator.call(*args, **kwargs)
        return chain.run(operator, call, kernel=options.kernel, strict=options.strict)

    run.__name__ = run.__qualname__ = f"tcport_{operator.name}"
    return run
