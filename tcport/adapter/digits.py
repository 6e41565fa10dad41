"""A coordinate as a number in mixed radix: which views turn one dimension into the coordinates it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import sympy

from tcport.adapter.algebra import Expr, Space, divided, equal


@dataclasses.dataclass(frozen=True)
class Digit:
    """One digit: the part of a dimension of size ``radix`` at ``start + symbol``, or at ``start`` alone.

    Attributes:
        symbol: the coordinate that runs over the digit; None where it is fixed.
        radix: number of values the digit can have.
        start: first value taken.
        length: number of values taken.
    """

    symbol: Expr | None
    radix: Expr
    start: Expr
    length: Expr

    @property
    def is_all(self) -> bool:
        """Whether the coordinate runs over the whole digit."""
        return self.start == 0 and equal(self.length, self.radix)


def digits_of(space: Space, coord: Expr, size: Expr, whole: Set[Expr]) -> list[Digit] | None:
    """Split a dimension of ``size`` elements, read at ``coord``, into digits, most significant first.

    ``page * 16 + slot`` over 512 is the digits page of 32 and slot of 16; ``head * 256 + dim + 128`` over 2048 is the
    digits head of 8 and 128 + dim of 256. Coordinates in ``whole`` take whatever their digit has from ``start`` on.

    Returns:
        None when the coordinate is not such a number, or might not be for some size.
    """
    symbols = space.symbols_of(coord)
    rest, _ = sympy.expand(coord).as_independent(*symbols, as_Add=True)
    weights: list[tuple[Expr, Expr]] = []
    for term in sympy.Add.make_args(sympy.expand(coord - rest)):
        if term == 0:
            continue
        inside = [s for s in symbols if term.has(s)]
        if len(inside) != 1:
            return None
        weight = term.coeff(inside[0])
        if weight == 0 or not equal(weight * inside[0], term):
            return None
        weights.append((inside[0], weight))
    ordered = _by_weight(weights)
    if ordered is None:
        return None

    digits: list[Digit] = []
    above = size
    for symbol, weight in [*ordered, *([] if ordered and ordered[-1][1] == 1 else [(None, sympy.Integer(1))])]:
        radix = divided(above, weight)
        if radix is None:
            return None
        start = space.floordiv(rest, weight)
        rest = space.mod(rest, weight)
        if symbol is None:
            length = sympy.Integer(1)
        else:
            length = sympy.expand(radix - start) if symbol in whole else space.sizes[symbol]
        inside = space.at_least(start, sympy.Integer(0)) and space.at_least(radix, start + length)
        if start.has(sympy.Function) or not inside:
            return None
        digits.append(Digit(symbol, radix, start, length))
        above = weight
    return digits


def _by_weight(weights: list[tuple[Expr, Expr]]) -> list[tuple[Expr, Expr]] | None:
    """Heaviest first, each weight a multiple of the next."""
    ordered: list[tuple[Expr, Expr]] = []
    left = list(weights)
    while left:
        top = next((w for w in left if all(divided(w[1], other[1]) is not None for other in left)), None)
        if top is None:
            return None
        ordered.append(top)
        left.remove(top)
    return ordered
