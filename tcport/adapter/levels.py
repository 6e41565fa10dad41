"""Float masks: tensors that hold one of a few constants, chosen by conditions, such as 0 and -inf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from tcport.adapter.booleans import FALSE, TRUE, Formula, all_of, any_of, boolean, in_triangle, negated
from tcport.adapter.sizes import is_size, tensor_of

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref

HIDING = -1e4
"""Logits at or below this (-inf, finfo.min, -1e9, -1e4) hide a key: exp(-1e4 + x) is 0 in fp32 for any logit x."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One level where ``condition`` holds and another where it does not."""

    condition: Formula
    yes: Levels
    no: Levels


Levels = float | Choice


def visible(levels: Levels) -> Formula | None:
    """Where an additive mask lets a key through; None if some level neither leaves a logit as it is nor hides it."""
    if isinstance(levels, Choice):
        yes, no = visible(levels.yes), visible(levels.no)
        if yes is None or no is None:
            return None
        return any_of(all_of(levels.condition, yes), all_of(negated(levels.condition), no))
    if levels == 0:
        return TRUE
    return FALSE if levels <= HIDING else None


def levels_of(reader: Reader, ref: Ref) -> Levels | None:
    """The value of a float element as constants under conditions; None if it is anything else."""
    end = reader.resolve(ref)
    tensor = tensor_of(end.node)
    if tensor is not None and tensor.dtype == torch.bool:
        return Choice(boolean(reader, end), 1.0, 0.0)
    return reader.apply(_LEVELS, end)


def constant_of(reader: Reader, ref: Ref, value: Any) -> float | None:
    """A number, or a tensor that holds one number everywhere."""
    levels = _operand(reader, ref, value)
    return levels if isinstance(levels, float) else None


def _operand(reader: Reader, ref: Ref, value: Any) -> Levels | None:
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, Node) and tensor_of(value) is not None:
        return levels_of(reader, reader.broadcast(value, ref))
    return None


def _combined(op: Callable[[float, float], float], a: Levels | None, b: Levels | None) -> Levels | None:
    """Apply ``op`` level by level. Combinations that give NaN are no mask."""
    if a is None or b is None:
        return None
    if isinstance(a, Choice):
        yes, no = _combined(op, a.yes, b), _combined(op, a.no, b)
        return None if yes is None or no is None else Choice(a.condition, yes, no)
    if isinstance(b, Choice):
        yes, no = _combined(op, a, b.yes), _combined(op, a, b.no)
        return None if yes is None or no is None else Choice(b.condition, yes, no)
    value = op(a, b)
    return None if math.isnan(value) else value


def _arithmetic(op: Callable[[float, float], float]) -> Any:
    def handler(reader: Reader, ref: Ref, input: Any, other: Any) -> Levels | None:
        return _combined(op, _operand(reader, ref, input), _operand(reader, ref, other))

    return handler


def _neg(reader: Reader, ref: Ref, input: Any) -> Levels | None:
    return _combined(lambda a, b: b - a, _operand(reader, ref, input), 0.0)


def _where(reader: Reader, ref: Ref, condition: Node, input: Any, other: Any) -> Levels | None:
    yes, no = _operand(reader, ref, input), _operand(reader, ref, other)
    if yes is None or no is None:
        return None
    return Choice(boolean(reader, reader.broadcast(condition, ref)), yes, no)


def _masked_fill(reader: Reader, ref: Ref, input: Node, mask: Node, value: Any) -> Levels | None:
    kept, filled = _operand(reader, ref, input), _operand(reader, ref, value)
    if kept is None or filled is None:
        return None
    return Choice(boolean(reader, reader.broadcast(mask, ref)), filled, kept)


def _triangle(lower: bool) -> Any:
    def handler(reader: Reader, ref: Ref, input: Node, diagonal: Any = 0) -> Levels | None:
        kept = _operand(reader, ref, input)
        return None if kept is None or not is_size(diagonal) else Choice(in_triangle(ref, diagonal, lower), kept, 0.0)

    return handler


def _log(reader: Reader, ref: Ref, input: Node) -> Levels | None:
    return _combined(
        lambda a, _: math.log(a) if a > 0 else -math.inf if a == 0 else math.nan, _operand(reader, ref, input), 0.0
    )


def _cast(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Levels | None:
    """A bool or integer mask as numbers (casts among floats are data movement, resolved before)."""
    return _operand(reader, ref, input)


def _full(reader: Reader, ref: Ref, size: Any, fill_value: Any = None, **_: Any) -> Levels | None:
    return _operand(reader, ref, fill_value)


def _new_full(reader: Reader, ref: Ref, input: Node, size: Any, fill_value: Any = None, **_: Any) -> Levels | None:
    return _operand(reader, ref, fill_value)


def _constant(value: float) -> Any:
    return lambda reader, ref, *_, **__: value


def _tensor(reader: Reader, ref: Ref, data: Any, **_: Any) -> Levels | None:
    return float(data) if isinstance(data, bool | int | float) else None


_LEVELS = {
    "add": _arithmetic(lambda a, b: a + b),
    **dict.fromkeys(("sub", "subtract"), _arithmetic(lambda a, b: a - b)),
    "rsub": _arithmetic(lambda a, b: b - a),
    **dict.fromkeys(("mul", "multiply"), _arithmetic(lambda a, b: a * b)),
    **dict.fromkeys(("neg", "negative"), _neg),
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
    "log": _log,
    **dict.fromkeys(("to", "float", "half", "bfloat16", "double", "type", "type_as", "int", "long"), _cast),
    **dict.fromkeys(("full", "full_like", "fill"), _full),
    "new_full": _new_full,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _constant(0.0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(1.0)),
    **dict.fromkeys(("tensor", "scalar_tensor"), _tensor),
}
