"""Nodes that change nothing: views that together give a tensor as it was, casts to the dtype it has, empty dropout."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tcport.functional_write import is_view

_CAST = torch.ops.prims.convert_element_type.default


def innermost(node: torch.fx.Node) -> torch.fx.Node:
    """The first node that computed what a node holds: the node itself, or one behind nodes that change nothing."""
    while (inner := next((n for n in _behind(node) if _is_same(n, node)), None)) is not None:
        node = inner
    return node


def passes_on(node: torch.fx.Node) -> bool:
    """Whether a node only hands on what it was given: a view or a part of one, a cast or dropout that does nothing."""
    if node.target is operator.getitem and is_view(node.args[0]):  # type: ignore[arg-type]
        return True
    return is_view(node) or innermost(node) is not node or (_is_dropout(node) and bool(node.args[1] == 0))


def _behind(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes behind a chain of views, casts and dropouts, nearest first."""
    while (source := _source(node)) is not None:
        yield source
        node = source


def _source(node: torch.fx.Node) -> torch.fx.Node | None:
    """What a node passes on, bar its shape, or None."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node):
        return None
    if node.target is operator.getitem and _is_dropout(source):
        return source.args[0] if node.args[1] == 0 and source.args[1] == 0 else None  # type: ignore[return-value]
    if is_view(node) or node.target is _CAST:
        return source if isinstance(source.meta.get("val"), torch.Tensor) else None
    return None


def _is_dropout(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.native_dropout.default


def _is_same(inner: torch.fx.Node, outer: torch.fx.Node) -> bool:
    """Whether two nodes along one chain hold the same elements in the same places, so one may stand for the other."""
    a, b = inner.meta.get("val"), outer.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.layout != b.layout:
        return False
    if a.dtype != b.dtype or a.dim() != b.dim() or _narrows(inner, outer):
        return False
    numbers = zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
    return all(statically_known_true(x == y) for x, y in (*numbers, (a.storage_offset(), b.storage_offset())))


def _narrows(inner: torch.fx.Node, outer: torch.fx.Node) -> bool:
    """Whether the chain changes the dtype on the way: a value rounded and widened again is another value."""
    node: torch.fx.Node | None = outer
    while node is not None and node is not inner:
        value, node = node.meta["val"], _source(node)
        if node is not None and node.meta["val"].dtype != value.dtype:
            return True
    return False
