"""Exported programs for AOTInductor: tcport's operators become the C++ kernels, so that a package needs no Python.

    program = torch.export.export(model, arguments)
    lower_exported(program)
    package = torch._inductor.aoti_compile_and_package(program)

A program that was not lowered compiles as well, but its package calls ``tcport::paged_attention`` back in Python.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx.proxy import GraphAppendingTracer

from tcport.device import device_profile
from tcport.errors import NoCandidateError
from tcport.kernels import cpu_library
from tcport.lowering.operators import call_of_node, choose, device_of, operator_of

_KERNELS = {"paged_attention": "cpp_attention", "kv_write": "cpp_write"}


def lower_exported(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Replace the calls of tcport's operators on the CPU by calls of the C++ kernels, in place.

    K and V cache must be tensors of their own: AOTInductor of torch 2.11 reads and writes past the second of two inputs
    that share a storage, whichever operators use them.

    The process that runs the package loads :func:`kernel_library` first, with ``torch.ops.load_library`` or ``dlopen``.

    Returns:
        By node, the kernel it calls now, or why it calls the operator still.
    """
    graph, outcome = program.graph, {}
    for node in list(graph.nodes):
        operator = operator_of(node)
        if operator is None or operator.name not in _KERNELS:
            continue
        call = call_of_node(operator, node)
        if device_of(call).type != "cpu":
            outcome[node.name] = f"{operator.name}: only the CPU's kernels are in a library"
            continue
        try:
            choice = choose(operator, call, device_profile("cpu"), kernel=_KERNELS[operator.name])
        except NoCandidateError as error:
            outcome[node.name] = f"{operator.name}: {error}"
            continue
        candidate = choice.selection.candidates[0]
        outcome[node.name] = candidate.kernel
        _replace(graph, node, call, candidate)
    program.graph_module.recompile()
    return outcome


def kernel_library() -> str:
    """The file of the C++ kernels, which registers their operators when it is loaded.

    Raises:
        KernelBuildError: there is no compiler, or it failed.
    """
    return str(cpu_library.load().path)


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, call: Any, candidate: Any) -> None:
    tracer = GraphAppendingTracer(graph)
    proxies = {id(given.meta["val"]): torch.fx.Proxy(given, tracer) for given in node.all_input_nodes}
    inputs = {name: proxies[id(value)] for name, value in vars(call).items() if id(value) in proxies}
    last = node.prev
    with graph.inserting_before(node):
        candidate.run(dataclasses.replace(call, **inputs), lambda kernel: kernel)
    made = node.prev
    if made is last:
        raise RuntimeError(f"{candidate.kernel} left no call in the graph")
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
