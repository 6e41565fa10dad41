"""What Inductor made of a graph: the code that it generated, and the memory that the code allocates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
import torch.fx
from torch._inductor import ir
from torch._inductor.graph import GraphLowering


@dataclasses.dataclass(frozen=True)
class Audit:
    """What Inductor generated for a graph: the source, and buffers that are as large as a graph input."""

    source: str
    buffers: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer the generated code allocates: its name, number of elements, dtype, and the graph nodes behind it."""

    name: str
    numel: sympy.Expr
    dtype: torch.dtype
    bytes: int | None
    origins: tuple[torch.fx.Node, ...]


def auditing(codegen: Callable[[GraphLowering], Any], audit: Callable[[Audit], None]) -> Callable[[GraphLowering], Any]:
    """Inductor's code generation, which tells ``audit`` what came of it."""

    def audited(graph: GraphLowering) -> Any:
        result = codegen(graph)
        audit(Audit(getattr(result[0], "value", ""), tuple(_allocated(graph))))
        return result

    return audited


def _allocated(graph: GraphLowering) -> Iterator[Buffer]:
    """The buffers of a lowered graph that get memory of their own."""
    for buffer in graph.buffers:
        layout = buffer.layout if isinstance(getattr(buffer, "layout", None), ir.Layout) else None
        if layout is None or isinstance(layout, (ir.MutationLayoutSHOULDREMOVE, ir.NonOwningLayout)):
            continue
        numel = sympy.sympify(sympy.prod(layout.size))
        size = graph.sizevars.optimization_hint(numel, fallback=0) * layout.dtype.itemsize
        origins = tuple(sorted(buffer.origins, key=lambda n: n.name))
        yield Buffer(buffer.get_name(), numel, layout.dtype, size or None, origins)
