"""Sizes, which torch keeps as ints or SymInts and graphs as nodes, as sympy expressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from tcport.adapter.algebra import Expr


def size_expr(size: Any) -> Expr:
    """An int, a SymInt or a node holding either, as a sympy expression."""
    if isinstance(size, Node):
        size = size.meta.get("example_value")
    if isinstance(size, torch.SymInt):
        return sympy.expand(size.node.expr)
    return sympy.Integer(size)


def is_size(value: Any) -> bool:
    """Whether :func:`size_expr` takes the value."""
    if isinstance(value, Node):
        value = value.meta.get("example_value")
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def tensor_of(node: Node) -> Tensor | None:
    """The node's example value, when it is a tensor."""
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def shape_of(node: Node) -> tuple[Expr, ...]:
    """The sizes of a tensor node; () for a node that holds no tensor."""
    tensor = tensor_of(node)
    return () if tensor is None else tuple(size_expr(size) for size in tensor.shape)


def meet(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Let the sizes of operands that broadcast together be known to be equal, where neither is 1.

    They are equal in every run that gets this far; but not every operation has told the size symbols so.

    Returns:
        Whether that was news: sizes read before may now be spelled with another symbol.
    """
    news = False
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if size_expr(x) == size_expr(y) or 1 in (size_expr(x), size_expr(y)):
            continue
        same = x == y
        if isinstance(same, torch.SymBool) and same.node.has_hint() and same.node.hint:
            news |= bool(same)  # a guard: from here on both have one symbol
    return news


def leaves(tree: Any) -> Iterator[Any]:
    """What lies inside nested lists, tuples, dicts and slices."""
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    elif isinstance(tree, slice):
        yield from leaves([tree.start, tree.stop, tree.step])
    else:
        yield tree
