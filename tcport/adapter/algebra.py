"""Integer arithmetic over coordinates.

The adapter describes a tensor by what it holds at a symbolic coordinate. ``k_cache[block_table]`` at coordinate
``(b, m, p, h, d)`` is ``k_cache`` at ``(Read(block_table, b, m), p, h, d)``, and every spelling of that gather comes
out as the same expression once the arithmetic is simplified. Only two things go beyond sympy: :class:`Read` and
:class:`FloorDiv`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy

if TYPE_CHECKING:
    Expr: TypeAlias = Any  # sympy's own annotations lose the class at every operation
else:
    Expr = sympy.Expr


class Read(sympy.Function):
    """``Read(tensor id, version, *coordinates)``: one element of an integer or bool tensor."""

    def _eval_is_integer(self) -> bool:
        return True

    @property
    def coords(self) -> tuple[Expr, ...]:
        """The coordinates, without the tensor's id and version."""
        return self.args[2:]


class FloorDiv(sympy.Function):
    """``FloorDiv(x, n)``: x divided by a positive n, rounded down. Build it with :meth:`Space.floordiv`."""

    def _eval_is_integer(self) -> bool:
        return True


class Space:
    """Coordinate symbols and the sizes they range over; simplification that needs those ranges.

    A size is taken to be at least 1: with an empty dimension there is no element to be wrong about.
    """

    def __init__(self) -> None:
        self.sizes: dict[Expr, Expr] = {}
        self._serial = itertools.count()

    def symbol(self, hint: str, size: Expr) -> Expr:
        """A new coordinate over ``0 .. size-1``; simply 0 when ``size`` is 1."""
        if size == 1:
            return sympy.Integer(0)
        symbol = sympy.Symbol(f"{hint}{next(self._serial)}", integer=True, nonnegative=True)
        self.sizes[symbol] = size
        return symbol

    def symbols_of(self, *exprs: Expr) -> set[Expr]:
        """The coordinate symbols (not the size symbols) in ``exprs``, those inside reads included."""
        return {s for e in exprs for s in e.free_symbols if s in self.sizes}

    def in_order(self, coord: Expr) -> list[Expr]:
        """The coordinates merged in one, slowest first."""
        weight = {s: coord.coeff(s) for s in self.symbols_of(coord)}
        slower = {s: sum(divided(weight[s], w) is not None for w in weight.values()) for s in weight}
        return sorted(weight, key=lambda s: -slower[s])

    def size_of(self, symbols: Iterable[Expr]) -> Expr:
        """Number of points in the box that ``symbols`` span."""
        return sympy.expand(sympy.prod([self.sizes[s] for s in symbols]))

    def floordiv(self, x: Expr, n: Expr) -> Expr:
        """``x // n`` (rounded down), simplified."""
        x, n = sympy.expand(x), sympy.sympify(n)
        if n == 1:
            return x
        whole, rest = [], []
        for term in sympy.Add.make_args(x):
            if term.is_Integer and n.is_Integer:
                whole.append(term // n)
                rest.append(term % n)
                continue
            quotient = divided(term, n)
            (rest if quotient is None else whole).append(term if quotient is None else quotient)
        remainder = sympy.Add(*rest)
        if self._within(remainder, n):
            return sympy.Add(*whole)
        if isinstance(remainder, FloorDiv):
            return sympy.Add(*whole, self.floordiv(remainder.args[0], sympy.expand(remainder.args[1] * n)))
        rounded: Any = self._coarser(remainder, n)
        if rounded is None:
            rounded = FloorDiv(remainder, n)
        return sympy.Add(*whole, rounded)

    def mod(self, x: Expr, n: Expr) -> Expr:
        """``x % n`` with the sign of n: written ``x - n * (x // n)`` so that the two halves of a split cancel."""
        return sympy.expand(x - n * self.floordiv(x, n))

    def substitute(self, expr: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
        """``expr`` with coordinates replaced, and simplified again."""
        if not mapping or not (expr.free_symbols or expr.has(Read)):
            return expr
        swapped = expr.xreplace(dict(mapping))
        swapped = swapped.replace(lambda e: isinstance(e, FloorDiv), lambda e: self.floordiv(*e.args))
        return sympy.expand(swapped)

    def bounds(self, x: Expr) -> tuple[Expr, Expr] | None:
        """Least and greatest value of ``x`` over its coordinates, as polynomials in the sizes; None if unknown."""
        x = sympy.expand(x)
        for part in x.atoms(FloorDiv):
            inner, n = part.args
            times = divided(-x.coeff(part), n)  # k * (inner - n * part) is k * (inner % n), in 0 .. k * (n - 1)
            if times is not None and times.is_positive and times.is_number:
                rest = sympy.expand(x - times * (inner - n * part))
                known = None if rest.has(part) else self.bounds(rest)
                if known is not None:
                    return known[0], sympy.expand(known[1] + times * (n - 1))
        low = high = sympy.Integer(0)
        for term in sympy.Add.make_args(x):
            span = self._span(term)
            if span is None:
                return None
            low, high = low + span[0], high + span[1]
        return sympy.expand(low), sympy.expand(high)

    def at_least(self, a: Expr, b: Expr) -> bool:
        """Whether ``a >= b`` is certain for all coordinates and sizes."""
        span = self.bounds(sympy.expand(a - b))
        return span is not None and _nonnegative(span[0])

    def _coarser(self, x: Expr, n: Expr) -> Expr | None:
        """``(w*y + r) // (w*m)`` is ``y // m`` when ``0 <= r < w``: what is finer than the division does not matter."""
        terms = sympy.Add.make_args(x)
        weights = {term.as_independent(*self.sizes, Read, FloorDiv, as_Add=False)[0] for term in terms}
        for weight in weights - {sympy.Integer(1)}:
            ratio = divided(n, weight)
            if ratio is None:
                continue
            coarse = [q for term in terms if (q := divided(term, weight)) is not None]
            fine = sympy.Add(*[term for term in terms if divided(term, weight) is None])
            if self._within(fine, weight):
                return self.floordiv(sympy.Add(*coarse), ratio)
        return None

    def _within(self, x: Expr, n: Expr) -> bool:
        """Whether ``0 <= x < n`` is certain."""
        span = self.bounds(x)
        return span is not None and _nonnegative(span[0]) and _nonnegative(n - 1 - span[1])

    def _span(self, term: Expr) -> tuple[Expr, Expr] | None:
        """Bounds of one product: a number, sizes (at least 1), and factors that range from 0 up."""
        number, factors = term.as_coeff_mul()
        scale, reach = number, sympy.Integer(1)
        ranged = False
        for factor in factors:
            top = self._top(factor)
            if top is None:
                if self.symbols_of(factor) or factor.has(Read, FloorDiv) or not factor.is_nonnegative:
                    return None
                scale = scale * factor
            else:
                ranged, reach = True, reach * top
        extreme = scale * reach
        if not ranged:
            return extreme, extreme
        return (sympy.Integer(0), extreme) if number.is_nonnegative else (extreme, sympy.Integer(0))

    def _top(self, factor: Expr) -> Expr | None:
        """Greatest value of a factor that ranges from 0 up, or None."""
        if factor in self.sizes:
            return self.sizes[factor] - 1
        if isinstance(factor, FloorDiv):
            inner, n = factor.args
            span = self.bounds(inner)
            if span is None or not _nonnegative(span[0]):
                return None
            exact = divided(span[1] + 1, n)
            if exact is not None:
                return exact - 1
            return span[1] // n if span[1].is_number and n.is_number else span[1]
        return None


def divided(x: Expr, n: Expr) -> Expr | None:
    """``x / n`` when that is a polynomial with integer coefficients, else None."""
    if x == 0:
        return sympy.Integer(0)
    if n == 1:
        return x
    quotient = sympy.expand(x / n) if not isinstance(n, sympy.Add) else sympy.cancel(x / n)
    for term in sympy.Add.make_args(quotient):
        if term.as_numer_denom()[1] != 1:
            return None
    return quotient


def equal(a: Expr | int, b: Expr | int) -> bool:
    """Whether two expressions are the same for every value of their symbols."""
    return a == b or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0


def _nonnegative(x: Expr) -> bool:
    """Whether a polynomial in the sizes is certainly >= 0 when every size is at least 1."""
    x = sympy.expand(x)
    shifted = sympy.expand(x.xreplace({s: s + 1 for s in x.free_symbols}))
    return all(
        number.is_nonnegative and (rest == 1 or bool(rest.is_nonnegative))
        for rest, number in shifted.as_coefficients_dict().items()
    )
