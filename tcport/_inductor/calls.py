"""Inductor's generated code, called by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.output_code import CompiledFxGraph


def generated_code(compiled: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """What a call of compiled code runs behind Dynamo's guards and AOTAutograd's wrappers, on the same arguments.

    Args:
        compiled: what ``torch.compile`` returned; it is called once, and runs one graph.
        args: its arguments.
    """
    calls: list[tuple[Callable[..., Any], list[Any]]] = []
    call = CompiledFxGraph.__call__

    def noting(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        assert graph.current_callable is not None
        calls.append((graph.current_callable, list(inputs)))
        return call(graph, inputs)

    CompiledFxGraph.__call__ = noting  # type: ignore[method-assign]
    try:
        compiled(*args)
    finally:
        CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
    ((code, inputs),) = calls
    return lambda: code(list(inputs))  # it empties the list that it is given
