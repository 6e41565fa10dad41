"""Writes in place within a trace, as Inductor can lower them.

Inductor is made for graphs that are functional but for writes to their inputs. Elsewhere ``copy_`` makes the
destination the buffer of the source itself, which the next write then changes as well; and an operator that it has no
lowering for (``exponential_``, ``t_``) it takes to return a buffer of its own. Nothing of this is an error: numbers are
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional
from torch._inductor.lowering import lowerings

_aten = torch.ops.aten


def with_safe_writes(
    traced: torch.fx.GraphModule, retrace: Callable[[Callable[..., Any]], torch.fx.GraphModule]
) -> torch.fx.GraphModule:
    """A trace whose writes Inductor lowers right: the same one, or a functional one.

    Args:
        traced: the trace of a lowering. retrace: traces a function of the same arguments.
    """
    inputs = _inputs(traced)
    if any(_is_astray(node, inputs) for node in traced.graph.nodes):
        traced = retrace(torch.func.functionalize(traced, remove="mutations"))
        decompose_triton_kernel_wrapper_functional(traced.graph)
    for copy in traced.graph.find_nodes(op="call_function", target=_aten.copy_.default):
        source = copy.args[1]
        with traced.graph.inserting_before(copy):
            own = traced.graph.call_function(_aten.clone.default, (source,))
        own.meta["val"] = source.meta["val"]
        copy.update_arg(1, own)
    return traced


def _is_astray(node: torch.fx.Node, inputs: set[int]) -> bool:
    """Whether a node writes to a tensor that is no input of the graph, or by an operator without a lowering."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False  # other libraries' operators, and kernels, are called as they are
    written = _written(node)
    return bool(written) and (node.target not in lowerings or not inputs.issuperset(map(_memory, written)))


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node writes to."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
    written: list[torch.fx.Node] = []
    torch.fx.map_arg([given.get(a.name) for a in arguments if a.is_write], written.append)
    return written


def _inputs(traced: torch.fx.GraphModule) -> set[int]:
    given = traced.graph.find_nodes(op="placeholder")
    return {_memory(node) for node in given if isinstance(node.meta.get("val"), torch.Tensor)}


def _memory(node: torch.fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata
