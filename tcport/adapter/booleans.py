"""Boolean masks as formulas: comparisons of integer expressions, opaque flags, and, or, not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from tcport.adapter.algebra import Expr, Space
from tcport.adapter.sizes import is_size, size_expr, tensor_of

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref


@dataclasses.dataclass(frozen=True)
class Truth:
    """True or False everywhere."""

    value: bool


@dataclasses.dataclass(frozen=True)
class AtLeastZero:
    """``expr >= 0``: what every comparison of integers comes down to."""

    expr: Expr


@dataclasses.dataclass(frozen=True)
class Flag:
    """An element of a bool tensor that is not understood any further; ``read`` says which."""

    read: Expr


@dataclasses.dataclass(frozen=True)
class Not:
    """Negation; :func:`negated` pushes it down to the flags."""

    part: Flag


@dataclasses.dataclass(frozen=True)
class And:
    """Conjunction of at least two formulas."""

    parts: tuple[Formula, ...]


@dataclasses.dataclass(frozen=True)
class Or:
    """Disjunction of at least two formulas."""

    parts: tuple[Formula, ...]


Formula = Truth | AtLeastZero | Flag | Not | And | Or
TRUE, FALSE = Truth(True), Truth(False)


def all_of(*parts: Formula) -> Formula:
    """Conjunction, flattened, without repetitions, and without what is constant."""
    flat = dict.fromkeys(leaf for part in parts for leaf in conjuncts(part))
    if FALSE in flat:
        return FALSE
    kept = tuple(flat)
    return TRUE if not kept else kept[0] if len(kept) == 1 else And(kept)


def any_of(*parts: Formula) -> Formula:
    """Disjunction, by De Morgan."""
    return negated(all_of(*map(negated, parts)))


def negated(formula: Formula) -> Formula:
    """The formula that holds exactly where this one does not."""
    if isinstance(formula, Truth):
        return Truth(not formula.value)
    if isinstance(formula, AtLeastZero):
        return AtLeastZero(sympy.expand(-formula.expr - 1))
    if isinstance(formula, Flag):
        return Not(formula)
    if isinstance(formula, Not):
        return formula.part
    flipped = tuple(negated(part) for part in formula.parts)
    return Or(flipped) if isinstance(formula, And) else all_of(*flipped)


def conjuncts(formula: Formula) -> Iterator[Formula]:
    """The formulas that must all hold; none for :data:`TRUE`."""
    if isinstance(formula, And):
        for part in formula.parts:
            yield from conjuncts(part)
    elif formula != TRUE:
        yield formula


def expressions(formula: Formula) -> Iterator[Expr]:
    """Every expression inside a formula."""
    if isinstance(formula, AtLeastZero):
        yield formula.expr
    elif isinstance(formula, Flag):
        yield formula.read
    elif isinstance(formula, Not):
        yield formula.part.read
    elif isinstance(formula, And | Or):
        for part in formula.parts:
            yield from expressions(part)


def substituted(space: Space, formula: Formula, mapping: dict[Expr, Expr]) -> Formula:
    """The formula at other coordinates."""
    if isinstance(formula, AtLeastZero):
        return AtLeastZero(space.substitute(formula.expr, mapping))
    if isinstance(formula, Flag):
        return Flag(space.substitute(formula.read, mapping))
    if isinstance(formula, Not):
        return Not(Flag(space.substitute(formula.part.read, mapping)))
    if isinstance(formula, And | Or):
        return type(formula)(tuple(substituted(space, part, mapping) for part in formula.parts))
    return formula


def boolean(reader: Reader, ref: Ref) -> Formula:
    """The value of a bool element as a formula; an opaque :class:`Flag` at worst."""
    end = reader.resolve(ref)
    formula = reader.apply(_FORMULAS, end)
    return Flag(reader.read(end)) if formula is None else formula


def _operand(reader: Reader, ref: Ref, value: Any) -> Formula | None:
    if isinstance(value, bool):
        return Truth(value)
    if isinstance(value, Node) and (tensor := tensor_of(value)) is not None and tensor.dtype == torch.bool:
        return boolean(reader, reader.broadcast(value, ref))
    return None


def _difference(reader: Reader, ref: Ref, left: Any, right: Any) -> Expr | None:
    """``left - right`` for a comparison of integers."""
    a, b = reader.operand(left, ref), reader.operand(right, ref)
    return None if a is None or b is None else sympy.expand(a - b)


def _comparison(greater: bool, strict: bool) -> Any:
    def handler(reader: Reader, ref: Ref, input: Any, other: Any) -> Formula | None:
        difference = _difference(reader, ref, input, other)
        if difference is None:
            return None
        return AtLeastZero(sympy.expand((difference if greater else -difference) - (1 if strict else 0)))

    return handler


def _eq(reader: Reader, ref: Ref, input: Any, other: Any) -> Formula | None:
    difference = _difference(reader, ref, input, other)
    if difference is not None:
        return all_of(AtLeastZero(difference), AtLeastZero(sympy.expand(-difference)))
    formula = _operand(reader, ref, input)
    if formula is None or not isinstance(other, bool | int) or other not in (0, 1):
        return None
    return formula if other else negated(formula)


def _ne(reader: Reader, ref: Ref, input: Any, other: Any) -> Formula | None:
    formula = _eq(reader, ref, input, other)
    return None if formula is None else negated(formula)


def _not(reader: Reader, ref: Ref, input: Any) -> Formula | None:
    formula = _operand(reader, ref, input)
    return None if formula is None else negated(formula)


def _and(reader: Reader, ref: Ref, input: Any, other: Any) -> Formula | None:
    a, b = _operand(reader, ref, input), _operand(reader, ref, other)
    return None if a is None or b is None else all_of(a, b)


def _or(reader: Reader, ref: Ref, input: Any, other: Any) -> Formula | None:
    a, b = _operand(reader, ref, input), _operand(reader, ref, other)
    return None if a is None or b is None else any_of(a, b)


def _where(reader: Reader, ref: Ref, condition: Node, input: Any, other: Any) -> Formula | None:
    c, a, b = (_operand(reader, ref, value) for value in (condition, input, other))
    if c is None or a is None or b is None:
        return None
    return any_of(all_of(c, a), all_of(negated(c), b))


def _masked_fill(reader: Reader, ref: Ref, input: Node, mask: Node, value: Any) -> Formula | None:
    filled = Truth(bool(value)) if isinstance(value, bool | int) else None
    kept, where = _operand(reader, ref, input), _operand(reader, ref, mask)
    if filled is None or kept is None or where is None:
        return None
    return any_of(all_of(where, filled), all_of(negated(where), kept))


def _triangle(lower: bool) -> Any:
    def handler(reader: Reader, ref: Ref, input: Node, diagonal: Any = 0) -> Formula | None:
        kept = _operand(reader, ref, input)
        return None if kept is None or not is_size(diagonal) else all_of(kept, in_triangle(ref, diagonal, lower))

    return handler


def in_triangle(ref: Ref, diagonal: Any, lower: bool) -> Formula:
    """Whether an element lies on the side of the diagonal that ``tril`` (``lower``) or ``triu`` keeps."""
    row, column = ref.coords[-2], ref.coords[-1]
    below = sympy.expand(row + size_expr(diagonal) - column)
    return AtLeastZero(below if lower else -below)


def _constant(value: bool) -> Any:
    return lambda reader, ref, *_, **__: Truth(value)


def _full(reader: Reader, ref: Ref, size: Any, fill_value: Any = None, **_: Any) -> Formula | None:
    return Truth(bool(fill_value)) if isinstance(fill_value, bool | int) else None


def _to_bool(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Formula | None:
    """A cast of an integer tensor: nonzero is True."""
    difference = _difference(reader, ref, input, 0)
    if difference is None:
        return None
    return any_of(AtLeastZero(difference - 1), AtLeastZero(-difference - 1))


_FORMULAS = {
    **dict.fromkeys(("lt", "less"), _comparison(greater=False, strict=True)),
    **dict.fromkeys(("le", "less_equal"), _comparison(greater=False, strict=False)),
    **dict.fromkeys(("gt", "greater"), _comparison(greater=True, strict=True)),
    **dict.fromkeys(("ge", "greater_equal"), _comparison(greater=True, strict=False)),
    "eq": _eq,
    **dict.fromkeys(("ne", "not_equal"), _ne),
    **dict.fromkeys(("invert", "logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("and", "logical_and", "bitwise_and", "mul"), _and),
    **dict.fromkeys(("or", "logical_or", "bitwise_or"), _or),
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(True)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _constant(False)),
    **dict.fromkeys(("full", "full_like"), _full),
    **dict.fromkeys(("to", "bool"), _to_bool),
}
