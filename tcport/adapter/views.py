"""Operations that move data without choosing it by value: views, broadcasts, copies and casts within one kind.

Each handler maps the coordinate of an output element to that of the input element it holds. Reshapes of every spelling
are one rule, because both ends list the same elements in the same row-major order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from tcport.adapter.algebra import Expr, Space, divided, equal
from tcport.adapter.sizes import is_size, shape_of, size_expr, tensor_of

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref


def reshape_coords(
    space: Space, source: tuple[Expr, ...], target: tuple[Expr, ...], coords: tuple[Expr, ...]
) -> tuple[Expr, ...] | None:
    """The coordinate in a tensor of sizes ``source`` of the element at ``coords`` of its reshape to ``target``.

    Dimensions are matched in groups of equal products, so that only what is really merged or split gets arithmetic.
    """
    result: list[Expr] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [], []
        size_left = size_right = sympy.Integer(1)
        while True:
            if i < len(source) and (not left or not _covers(size_left, size_right)):
                left.append(source[i])
                size_left = sympy.expand(size_left * source[i])
                i += 1
            elif j < len(target):
                right.append((target[j], coords[j]))
                size_right = sympy.expand(size_right * target[j])
                j += 1
            elif i >= len(source):
                break
            else:
                left.append(source[i])
                size_left = sympy.expand(size_left * source[i])
                i += 1
            if equal(size_left, size_right) and left and right:
                break
        if not equal(size_left, size_right):
            return None
        result += _regroup(space, left, right)
    return tuple(result)


def _covers(a: Expr, b: Expr) -> bool:
    """Whether collecting more of ``b`` could reach ``a``: a is a known multiple of b and not equal to it."""
    return not equal(a, b) and divided(a, b) is not None


def _regroup(space: Space, left: list[Expr], right: list[tuple[Expr, Expr]]) -> list[Expr]:
    linear = sympy.Integer(0)
    for size, coord in right:
        linear = linear * size + coord
    out: list[Expr] = []
    for size in reversed(left[1:]):
        out.append(space.mod(linear, size) if size != 1 else sympy.Integer(0))
        linear = space.floordiv(linear, size)
    first = sympy.expand(linear) if left and left[0] != 1 else sympy.Integer(0)
    return [first, *reversed(out)] if left else []


def _reshape(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Ref | None:
    if not same_kind(input, ref.node, exact=True):
        return None  # view(dtype) reinterprets bits
    coords = reshape_coords(reader.space, shape_of(input), shape_of(ref.node), ref.coords)
    return None if coords is None else _at(ref, input, coords)


def _permute(reader: Reader, ref: Ref, input: Node, *dims: Any, **kwargs: Any) -> Ref:
    order = _listed(kwargs.get("dims", dims))
    coords: list[Expr] = [sympy.Integer(0)] * len(order)
    for position, dim in enumerate(order):
        coords[dim] = ref.coords[position]
    return _at(ref, input, coords)


def _transpose(reader: Reader, ref: Ref, input: Node, dim0: int, dim1: int) -> Ref:
    coords = list(ref.coords)
    coords[dim0], coords[dim1] = coords[dim1], coords[dim0]
    return _at(ref, input, coords)


def _swap_last(reader: Reader, ref: Ref, input: Node, *_: Any) -> Ref:
    return _at(ref, input) if len(ref.coords) < 2 else _transpose(reader, ref, input, -1, -2)


def _reverse(reader: Reader, ref: Ref, input: Node, *_: Any) -> Ref:
    return _at(ref, input, ref.coords[::-1])


def _movedim(reader: Reader, ref: Ref, input: Node, source: Any, destination: Any) -> Ref:
    rank = len(ref.coords)
    sources = [d % rank for d in _listed([source])]
    targets = [d % rank for d in _listed([destination])]
    order = [d for d in range(rank) if d not in sources]
    for target, origin in sorted(zip(targets, sources, strict=True)):
        order.insert(target, origin)
    return _permute(reader, ref, input, *order)


def _expand(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Ref:
    return _at(reader.broadcast(input, ref), input)


def _same(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Ref | None:
    return _at(ref, input, ref.coords) if same_kind(input, ref.node) else None


def _copy(reader: Reader, ref: Ref, input: Node, src: Any, non_blocking: bool = False) -> Ref | None:
    if not isinstance(src, Node) or tensor_of(src) is None or not same_kind(src, ref.node):
        return None
    return reader.broadcast(src, ref)


def _narrow(reader: Reader, ref: Ref, input: Node, dim: int, start: Any, length: Any) -> Ref | None:
    offset = from_start(reader.space, start, shape_of(input)[dim])
    if offset is None:
        return None
    coords = list(ref.coords)
    coords[dim] = coords[dim] + offset
    return _at(ref, input, coords)


def _select(reader: Reader, ref: Ref, input: Node, dim: int, index: Any) -> Ref | None:
    dim = dim % len(shape_of(input))
    position = from_start(reader.space, index, shape_of(input)[dim])
    return None if position is None else _at(ref, input, (*ref.coords[:dim], position, *ref.coords[dim:]))


def _repeat_interleave(reader: Reader, ref: Ref, input: Node, repeats: Any, dim: int | None = None, **_: Any) -> Any:
    if not is_size(repeats):
        return None
    shape = shape_of(input)
    coords = list(ref.coords)
    if dim is None:
        if len(shape) != 1:
            return None
        dim = 0
    coords[dim] = reader.space.floordiv(coords[dim], size_expr(repeats))
    if shape[dim] == 1:
        coords[dim] = sympy.Integer(0)
    return _at(ref, input, coords)


def _repeat(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Ref:
    shape = shape_of(input)
    coords = ref.coords[len(ref.coords) - len(shape) :]
    return _at(ref, input, [reader.space.mod(c, n) for c, n in zip(coords, shape, strict=True)])


def _dropout(reader: Reader, ref: Ref, input: Node, p: Any = 0.5, training: Any = True, inplace: bool = False) -> Any:
    nothing_dropped = training is False or (isinstance(p, int | float) and p == 0)
    return _at(ref, input, ref.coords) if nothing_dropped else None


def from_start(space: Space, index: Any, size: Expr) -> Expr | None:
    """An index or slice start counted from 0, when its sign is certain and it lies inside the dimension."""
    if not is_size(index):
        return None
    value = size_expr(index)
    if space.at_least(value, sympy.Integer(0)):
        return value
    if space.at_least(sympy.Integer(-1), value) and space.at_least(size + value, sympy.Integer(0)):
        return size + value
    return None


def same_kind(a: Node, b: Node, exact: bool = False) -> bool:
    """Whether two tensor nodes are both float or both integers that count (``exact``: of one dtype)."""
    x, y = tensor_of(a), tensor_of(b)
    if x is None or y is None:
        return False
    if x.dtype == y.dtype:
        return True
    if exact:
        return False
    if x.dtype.is_floating_point:
        return y.dtype.is_floating_point
    return {x.dtype, y.dtype} == {torch.int32, torch.int64}  # the narrow and the unsigned ones wrap around


def _at(ref: Ref, node: Node, coords: Any = None) -> Ref:
    return type(ref)(node, tuple(ref.coords if coords is None else coords), ref.time)


def _listed(dims: Any) -> list[int]:
    flat: list[int] = []
    for dim in dims:
        flat += _listed(dim) if isinstance(dim, list | tuple) else [dim]
    return flat


VIEWS = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("view_as", "reshape_as", "_unsafe_view"), _reshape),
    "permute": _permute,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("t", "mT", "adjoint"), _swap_last),
    "T": _reverse,
    **dict.fromkeys(("movedim", "moveaxis"), _movedim),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("contiguous", "clone", "detach", "alias", "to", "type", "type_as", "_to_copy", "cuda"), _same),
    **dict.fromkeys(("float", "half", "bfloat16", "double", "long", "int", "short"), _same),
    "copy": _copy,
    "narrow": _narrow,
    "select": _select,
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "dropout": _dropout,
}
