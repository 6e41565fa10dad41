"""Indexed writes, element by element: where an element goes in the cache, and where its value comes from."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, equal
from tcport.adapter.gather import indexed_coords
from tcport.adapter.graph import GraphFacts
from tcport.adapter.names import op_name
from tcport.adapter.reader import Reader, Ref, is_integral
from tcport.adapter.report import Rejected
from tcport.adapter.sizes import leaves, meet, shape_of, size_expr, tensor_of


@dataclasses.dataclass(frozen=True)
class Target:
    """One element of one write.

    Attributes:
        node: the node that writes.
        changed: the tensor it was handed.
        cache: the element written, in the tensor that ``changed`` is a view of.
        value: the element stored there.
        coords: coordinates that run over everything that is written.
    """

    node: Node
    changed: Node
    cache: Ref
    value: Ref
    coords: tuple[Expr, ...]


def target_of(reader: Reader, node: Node) -> Target | None:
    """Read a node as a write of a float tensor into a part of another; None when it is nothing of the kind.

    Raises:
        Rejected: it writes a part of a tensor that could be a cache, in a way that is not understood.
    """
    changed = aliasing.mutated(node)
    handler = _WRITES.get(op_name(node) or "")
    if handler is None or len(changed) != 1:
        return None
    held = tensor_of(changed[0])
    if held is None or held.dtype in (torch.bool, torch.int32, torch.int64):
        return None
    try:
        bound = inspect.signature(handler).bind(reader, node, changed[0], *node.args[1:], **node.kwargs)
    except TypeError:  # arguments of a form the handler does not know
        return None
    written = handler(*bound.args)
    if written is None:
        return None
    inside, value, coords = written
    time = reader.facts.position[node]
    path = reader.path(Ref(changed[0], tuple(inside), time))
    cache = [step for step in path if aliasing.aliases(step.node, changed[0])][-1]
    at = reader.broadcast(value, Ref(node, coords, time))
    return Target(node, changed[0], cache, at, coords) if len(cache.coords) >= 3 else None


def region_shape(facts: GraphFacts, node: Node, index: Any, value: Tensor) -> tuple[Expr, ...] | None:
    """Sizes of ``node[index]``, which takes ``value``; None for an index that picks by truth, or is not understood."""
    tensor = tensor_of(node)
    items = [item for item in leaves(index) if isinstance(item, Node)]
    if tensor is None or not all(is_integral(item) or tensor_of(item) is None for item in items):
        return None
    region = tensor[map_arg(index, lambda n: n.meta["example_value"])]
    facts.news |= meet(region.shape, value.shape)
    return tuple(size_expr(size) for size in region.shape)


Written = tuple[Any, Node, tuple[Expr, ...]]


def _symbols(reader: Reader, shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(reader.space.symbol("w", size) for size in shape)


def _setitem(reader: Reader, node: Node, changed: Node, index: Any, value: Any) -> Written | None:
    held = tensor_of(value) if isinstance(value, Node) else None
    if held is None or held.dim() == 0:
        return None  # one number for all is no new key
    shape = region_shape(reader.facts, changed, index, held)
    coords = _symbols(reader, shape or ())
    inside = None
    if shape is not None:
        inside = indexed_coords(reader, changed, index, coords, reader.facts.position[node])
    if inside is None and len(shape_of(changed)) >= 3 and changed.op in ("placeholder", "get_attr"):
        raise Rejected("slots", f"the index of {node.name} into {changed.name} is not understood")
    return None if inside is None else (inside, value, coords)


def _index_put(
    reader: Reader, node: Node, changed: Node, indices: Any, values: Any, accumulate: bool = False
) -> Written | None:
    if accumulate:
        raise Rejected("slots", f"{node.name} adds to what {changed.name} holds")
    index = tuple(slice(None) if i is None else i for i in indices)
    return _setitem(reader, node, changed, index, values)


def _along_dim(full_index: bool) -> Callable[..., Written | None]:
    """``index_copy_`` (one index per slice) and ``scatter_`` (one per element)."""

    def handler(reader: Reader, node: Node, changed: Node, dim: int, index: Node, source: Any) -> Written | None:
        if not isinstance(source, Node) or tensor_of(source) is None:
            return None
        dim = dim % len(shape_of(changed))
        shape = shape_of(index) if full_index else shape_of(source)
        coords = _symbols(reader, shape)
        at = coords if full_index else coords[dim : dim + 1]
        place = reader.integer(reader.broadcast(index, reader.ref(node, at, reader.facts.position[node])))
        inside = [*coords]
        inside[dim] = place
        return inside, source, coords

    return handler


def _scatter(reader: Reader, node: Node, changed: Node, dim: int, index: Node, src: Any) -> Written | None:
    return _along_dim(full_index=True)(reader, node, changed, dim, index, src)


def _copy(reader: Reader, node: Node, changed: Node, src: Any, non_blocking: bool = False) -> Written | None:
    if not isinstance(src, Node) or tensor_of(src) is None:
        return None
    coords = _symbols(reader, shape_of(changed))
    return coords, src, coords


_WRITES: dict[str, Callable[..., Written | None]] = {
    "setitem": _setitem,
    "index_put": _index_put,
    "index_copy": _along_dim(full_index=False),
    "scatter": _scatter,
    "copy": _copy,
}


def is_full(node: Node, dim: int, coord: Expr, sizes: dict[Expr, Expr]) -> bool:
    """Whether a coordinate runs over a whole dimension."""
    size = shape_of(node)[dim]
    return (coord == 0 and size == 1) or (coord in sizes and equal(sizes[coord], size))
