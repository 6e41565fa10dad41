"""Operations that choose data by value: indexing in every spelling, and picking one result of a split.

An index that is negative at run time counts from the end in PyTorch; coordinates ignore that. The only negative indices
of a paged cache are padding (unused table entries, skipped slots), whose data nobody may depend on.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from tcport.adapter.algebra import Expr
from tcport.adapter.names import op_name
from tcport.adapter.sizes import is_size, shape_of, size_expr, tensor_of
from tcport.adapter.views import from_start

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref


@dataclasses.dataclass(frozen=True)
class _Slice:
    start: Expr
    step: Expr


def indexed_coords(reader: Reader, node: Node, index: Any, coords: tuple[Expr, ...], time: int) -> list[Expr] | None:
    """The coordinate in ``node`` of the element at ``coords`` of ``node[index]``; None if the index is not understood.

    Follows PyTorch: integers select first; index tensors broadcast together, and their dimensions stand where the
    first of them stood, or in front when something else lies between them.
    """
    entries = _entries(reader, node, index, time)
    if entries is None:
        return None
    tensors = [e for e in entries if isinstance(e, Node)]
    block = _broadcast_rank(tensors)
    results = [e for e in entries if not isinstance(e, sympy.Expr)]  # selected dimensions are gone
    where = [i for i, e in enumerate(results) if isinstance(e, Node)]
    adjacent = not where or where[-1] - where[0] + 1 == len(where)
    lead = where[0] if where and adjacent else 0
    if len(results) - len(where) + block != len(coords):
        return None

    at = coords[lead : lead + block]
    rest = iter((*coords[:lead], *coords[lead + block :]))
    out: list[Expr] = []
    for entry in entries:
        if entry is None:
            next(rest)
        elif isinstance(entry, sympy.Expr):
            out.append(entry)
        elif isinstance(entry, _Slice):
            out.append(sympy.expand(next(rest) * entry.step + entry.start))
        else:
            out.append(reader.integer(reader.broadcast(entry, reader.ref(entry, at, time))))
    return out


def _entries(reader: Reader, node: Node, index: Any, time: int) -> list[Any] | None:
    """One entry per dimension of ``node``, and None per new axis: an Expr, a :class:`_Slice`, or an index tensor."""
    index = list(index) if isinstance(index, tuple) else [index]
    shape = list(shape_of(node))
    taken = sum(1 for item in index if item is not None and item is not Ellipsis)
    if taken > len(shape):
        return None
    fill = [slice(None)] * (len(shape) - taken)
    if any(item is Ellipsis for item in index):
        at = next(i for i, item in enumerate(index) if item is Ellipsis)
        index[at : at + 1] = fill
    else:
        index += fill
    entries: list[Any] = []
    sizes = iter(shape)
    for item in index:
        entry = None if item is None else _entry(reader, item, next(sizes), time)
        if entry is None and item is not None:
            return None
        entries.append(entry)
    return entries


def _entry(reader: Reader, item: Any, size: Expr, time: int) -> Any:
    if isinstance(item, slice):
        start = sympy.Integer(0) if item.start is None else from_start(reader.space, item.start, size)
        step = sympy.Integer(1) if item.step is None else size_expr(item.step) if is_size(item.step) else None
        return None if start is None or step is None else _Slice(start, step)
    if isinstance(item, Node) and (tensor := tensor_of(item)) is not None:
        if tensor.dtype in (torch.bool, torch.uint8) or tensor.dtype.is_floating_point:
            return None
        if tensor.dim() == 0:
            return reader.integer(reader.ref(item, (), time))
        return item
    return from_start(reader.space, item, size)


def _broadcast_rank(tensors: list[Node]) -> int:
    return max((len(shape_of(t)) for t in tensors), default=0)


def _getitem(reader: Reader, ref: Ref, input: Any, index: Any) -> Ref | None:
    if not isinstance(input, Node):
        return None
    if tensor_of(input) is None:
        return _part(reader, ref, input, index)
    coords = indexed_coords(reader, input, index, ref.coords, ref.time)
    return None if coords is None else reader.ref(input, coords, ref.time)


def _part(reader: Reader, ref: Ref, whole: Node, index: int) -> Ref | None:
    """Element of one result of ``unbind``, ``split``, ``chunk`` or ``tensor_split``; None for any other tuple."""
    name = op_name(whole)
    if name not in ("unbind", "split", "chunk", "tensor_split", "split_with_sizes"):
        return None  # arguments in the place of a dim may be anything, such as the values of an attention call
    source = whole.args[0] if whole.args else None
    parts = whole.meta.get("example_value")
    if not isinstance(source, Node) or not isinstance(parts, list | tuple) or not isinstance(index, int):
        return None
    positional = 1 if name == "unbind" else 2
    dim: Any = whole.kwargs.get("dim", whole.args[positional] if len(whole.args) > positional else 0)
    dim = dim % len(shape_of(source))
    if name == "unbind":
        where = sympy.Integer(index % len(parts))
        return reader.ref(source, (*ref.coords[:dim], where, *ref.coords[dim:]), ref.time)
    offset = sum((size_expr(p.shape[dim]) for p in parts[: index % len(parts)]), sympy.Integer(0))
    coords = list(ref.coords)
    coords[dim] = sympy.expand(coords[dim] + offset)
    return reader.ref(source, coords, ref.time)


def _index_select(reader: Reader, ref: Ref, input: Node, dim: int, index: Node) -> Ref:
    dim = dim % len(shape_of(input))
    at = reader.integer(reader.broadcast(index, reader.ref(index, ref.coords[dim : dim + 1], ref.time)))
    return reader.ref(input, (*ref.coords[:dim], at, *ref.coords[dim + 1 :]), ref.time)


def _index(reader: Reader, ref: Ref, input: Node, indices: Any) -> Ref | None:
    index = tuple(slice(None) if i is None else i for i in indices)
    return _getitem(reader, ref, input, index)


def _gather(reader: Reader, ref: Ref, input: Node, dim: int, index: Node, sparse_grad: bool = False) -> Ref:
    at = reader.integer(reader.ref(index, ref.coords, ref.time))
    coords = list(ref.coords)
    coords[dim] = at
    return reader.ref(input, coords, ref.time)


def _take_along_dim(reader: Reader, ref: Ref, input: Node, indices: Node, dim: int | None = None) -> Ref | None:
    if dim is None:
        return None
    at = reader.integer(reader.broadcast(indices, ref))
    coords = list(reader.broadcast(input, ref).coords)
    coords[dim] = at
    return reader.ref(input, coords, ref.time)


def _embedding(
    reader: Reader,
    ref: Ref,
    input: Node,
    weight: Node,
    padding_idx: Any = None,
    max_norm: Any = None,
    *_: Any,
    **__: Any,
) -> Ref | None:
    tensor = tensor_of(weight)
    if max_norm is not None or tensor is None or not tensor.dtype.is_floating_point:
        return None
    at = reader.integer(reader.ref(input, ref.coords[:-1], ref.time))
    return reader.ref(weight, (at, ref.coords[-1]), ref.time)


GATHERS = {
    "getitem": _getitem,
    "index_select": _index_select,
    "index": _index,
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "embedding": _embedding,
}
