"""Integer operations as arithmetic on expressions. Handlers return None for what they do not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
from torch.fx import Node

from tcport.adapter.algebra import Expr
from tcport.adapter.sizes import is_size, size_expr

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref


def _arange(reader: Reader, ref: Ref, *bounds: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> Any:
    if len(bounds) > 1:
        start, step = bounds[0], bounds[2] if len(bounds) > 2 else step
    if not (is_size(start) and is_size(step)):
        return None
    return size_expr(start) + size_expr(step) * ref.coords[0]


def _add(reader: Reader, ref: Ref, input: Any, other: Any, *, alpha: Any = 1) -> Expr | None:
    pair = _pair(reader, ref, input, other)
    return None if pair is None or not is_size(alpha) else pair[0] + size_expr(alpha) * pair[1]


def _sub(reader: Reader, ref: Ref, input: Any, other: Any, *, alpha: Any = 1) -> Expr | None:
    pair = _pair(reader, ref, input, other)
    return None if pair is None or not is_size(alpha) else pair[0] - size_expr(alpha) * pair[1]


def _rsub(reader: Reader, ref: Ref, input: Any, other: Any, alpha: Any = 1) -> Expr | None:
    return _sub(reader, ref, other, input, alpha=alpha)


def _mul(reader: Reader, ref: Ref, input: Any, other: Any) -> Expr | None:
    pair = _pair(reader, ref, input, other)
    return None if pair is None else pair[0] * pair[1]


def _floordiv(reader: Reader, ref: Ref, input: Any, other: Any) -> Expr | None:
    pair = _pair(reader, ref, input, other)
    return None if pair is None or not _is_positive(pair[1]) else reader.space.floordiv(*pair)


def _div(reader: Reader, ref: Ref, input: Any, other: Any, *, rounding_mode: str | None = None) -> Expr | None:
    if rounding_mode == "floor":
        return _floordiv(reader, ref, input, other)
    pair = _pair(reader, ref, input, other) if rounding_mode == "trunc" else None
    if pair is None or not _is_positive(pair[1]) or not reader.space.at_least(pair[0], sympy.Integer(0)):
        return None  # truncation is not flooring below zero
    return reader.space.floordiv(*pair)


def _mod(reader: Reader, ref: Ref, input: Any, other: Any) -> Expr | None:
    pair = _pair(reader, ref, input, other)
    return None if pair is None or not _is_positive(pair[1]) else reader.space.mod(*pair)


def _neg(reader: Reader, ref: Ref, input: Any) -> Expr | None:
    value = reader.operand(input, ref)
    return None if value is None else -value


def _rshift(reader: Reader, ref: Ref, input: Any, other: Any) -> Expr | None:
    return _floordiv(reader, ref, input, 2**other) if isinstance(other, int) else None


def _lshift(reader: Reader, ref: Ref, input: Any, other: Any) -> Expr | None:
    return _mul(reader, ref, input, 2**other) if isinstance(other, int) else None


def _low_bits(reader: Reader, ref: Ref, input: Any, other: Any) -> Expr | None:
    """``x & (2**k - 1)`` is ``x % 2**k``, for negative x too (two's complement)."""
    if not isinstance(other, int) or isinstance(other, bool) or other <= 0 or other & (other + 1):
        return None
    return _mod(reader, ref, input, other + 1)


def _full(reader: Reader, ref: Ref, size: Any, fill_value: Any = None, **_: Any) -> Expr | None:
    return size_expr(fill_value) if is_size(fill_value) else None


def _zeros(reader: Reader, ref: Ref, *_: Any, **__: Any) -> Expr:
    return sympy.Integer(0)


def _ones(reader: Reader, ref: Ref, *_: Any, **__: Any) -> Expr:
    return sympy.Integer(1)


def _new_full(reader: Reader, ref: Ref, input: Node, size: Any, fill_value: Any = None, **_: Any) -> Expr | None:
    return size_expr(fill_value) if is_size(fill_value) else None


def _tensor(reader: Reader, ref: Ref, data: Any, **_: Any) -> Expr | None:
    return size_expr(data) if is_size(data) else None


def _pair(reader: Reader, ref: Ref, input: Any, other: Any) -> tuple[Expr, Expr] | None:
    left, right = reader.operand(input, ref), reader.operand(other, ref)
    return None if left is None or right is None else (left, right)


def _is_positive(x: Expr) -> bool:
    return bool(x.is_positive)


INTEGERS = {
    "arange": _arange,
    "add": _add,
    **dict.fromkeys(("sub", "subtract"), _sub),
    "rsub": _rsub,
    **dict.fromkeys(("mul", "multiply"), _mul),
    **dict.fromkeys(("floordiv", "floor_divide"), _floordiv),
    **dict.fromkeys(("div", "divide"), _div),
    **dict.fromkeys(("mod", "remainder"), _mod),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _rshift),
    **dict.fromkeys(("lshift", "bitwise_left_shift"), _lshift),
    **dict.fromkeys(("and", "bitwise_and"), _low_bits),
    **dict.fromkeys(("full", "full_like", "fill"), _full),
    "new_full": _new_full,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _zeros),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _ones),
    **dict.fromkeys(("tensor", "scalar_tensor", "as_tensor"), _tensor),
}
