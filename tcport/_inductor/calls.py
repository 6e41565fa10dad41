"""Inductor's generated code, called by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.output_code import CompiledFxGraph


def generated_code(compiled: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], str]:
    """What a call of compiled code runs behind Dynamo's guards and AOTAutograd's wrappers, on the same arguments.

    Args:
        compiled: what ``torch.compile`` returned; it is called once, and runs one graph.
        args: its arguments.

    Returns:
        The code as a function of no arguments, and its text.
    """
    calls: list[tuple[CompiledFxGraph, list[Any]]] = []
    call = CompiledFxGraph.__call__

    def noting(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        calls.append((graph, list(inputs)))
        return call(graph, inputs)

    CompiledFxGraph.__call__ = noting  # type: ignore[method-assign]
    try:
        compiled(*args)
    finally:
        CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
    ((graph, inputs),) = calls
    code = graph.current_callable
    assert code is not None
    return lambda: code(list(inputs)), graph.source_code  # it empties the list that it is given
