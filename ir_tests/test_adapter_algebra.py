"""The arithmetic the adapter rests on, against integers: simplified expressions keep their value everywhere."""

from __future__ import annotations

import itertools
import math

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from tcport.adapter.algebra import FloorDiv, Read, Space, divided, equal
from tcport.adapter.booleans import AtLeastZero, Flag, all_of, any_of, negated
from tcport.adapter.digits import digits_of
from tcport.adapter.views import reshape_coords


def value(expr: sympy.Expr, at: dict[sympy.Symbol, int]) -> int:
    """An expression at a point, with divisions carried out."""
    if isinstance(expr, FloorDiv):
        return value(expr.args[0], at) // value(expr.args[1], at)
    if isinstance(expr, sympy.Add):
        return sum(value(arg, at) for arg in expr.args)
    if isinstance(expr, sympy.Mul):
        return math.prod(value(arg, at) for arg in expr.args)
    return at[expr] if expr in at else int(expr)


def points(space: Space) -> list[dict[sympy.Symbol, int]]:
    """Every point of a small space."""
    ranges = [range(int(size)) for size in space.sizes.values()]
    return [dict(zip(space.sizes, at, strict=True)) for at in itertools.product(*ranges)]


small = st.integers(1, 6)


@given(
    sizes=st.lists(small, min_size=1, max_size=3),
    weights=st.lists(st.integers(-9, 20), min_size=3, max_size=3),
    offset=st.integers(-20, 20),
    divisors=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
def test_division_and_remainder(sizes: list[int], weights: list[int], offset: int, divisors: list[int]) -> None:
    space = Space()
    symbols = [space.symbol("x", sympy.Integer(size)) for size in sizes]
    linear = sum((w * s for w, s in zip(weights, symbols, strict=False)), sympy.Integer(offset))
    quotient, remainder = linear, linear
    for divisor in divisors:
        quotient = space.floordiv(quotient, sympy.Integer(divisor))
        remainder = space.mod(remainder, sympy.Integer(divisor))
    for at in points(space):
        exact = value(linear, at)
        left = exact
        for divisor in divisors:
            left, exact = left % divisor, exact // divisor
        assert (value(quotient, at), value(remainder, at)) == (exact, left)


@given(
    sizes=st.lists(small, min_size=1, max_size=3),
    weights=st.lists(st.integers(-5, 9), min_size=3, max_size=3),
    divisor=st.integers(1, 9),
)
def test_bounds_hold(sizes: list[int], weights: list[int], divisor: int) -> None:
    space = Space()
    symbols = [space.symbol("x", sympy.Integer(size)) for size in sizes]
    linear = sum((w * s for w, s in zip(weights, symbols, strict=False)), sympy.Integer(0))
    for expr in (linear, space.mod(linear, sympy.Integer(divisor)), space.floordiv(linear, sympy.Integer(divisor))):
        bounds = space.bounds(expr)
        if bounds is not None:
            values = [value(expr, at) for at in points(space)]
            assert bounds[0] <= min(values)
            assert max(values) <= bounds[1]


@given(st.data())
def test_reshape_moves_every_element_where_torch_does(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))

    def shape() -> list[int]:
        """The factors in order, some neighbours multiplied together."""
        cuts = data.draw(st.lists(st.booleans(), min_size=len(factors) - 1, max_size=len(factors) - 1))
        sizes = [factors[0]]
        for cut, factor in zip(cuts, factors[1:], strict=True):
            if cut:
                sizes.append(factor)
            else:
                sizes[-1] *= factor
        return sizes

    source, target = shape(), shape()
    space = Space()
    coords = tuple(space.symbol("x", sympy.Integer(size)) for size in target)
    found = reshape_coords(space, tuple(map(sympy.Integer, source)), tuple(map(sympy.Integer, target)), coords)
    assert found is not None
    tensor = torch.arange(math.prod(source)).reshape(source)
    moved = tensor.reshape(target)
    for at in points(space):
        here = tuple(value(sympy.sympify(c), at) for c in coords)
        there = tuple(value(sympy.sympify(c), at) for c in found)
        assert moved[here] == tensor[there]


def test_reshape_with_symbolic_sizes() -> None:
    columns, page, heads = sympy.symbols("columns page heads", integer=True, positive=True)
    space = Space()
    b, j, h = space.symbol("b", sympy.Integer(3)), space.symbol("j", columns * page), space.symbol("h", heads)
    assert reshape_coords(
        space, (sympy.Integer(3), columns, page, heads), (sympy.Integer(3), columns * page, heads), (b, j, h)
    ) == (
        b,
        FloorDiv(j, page),
        j - page * FloorDiv(j, page),
        h,
    )


def test_a_slot_splits_into_its_page_and_offset() -> None:
    space = Space()
    j = space.symbol("j", sympy.Integer(40))
    page = Read(0, 0, FloorDiv(j, 8))
    slot = page * 8 + space.mod(j, sympy.Integer(8))
    assert space.floordiv(slot, sympy.Integer(8)) == page
    assert space.mod(slot, sympy.Integer(8)) == j - 8 * FloorDiv(j, 8)


def test_numbers_are_divided_at_once() -> None:
    space = Space()
    x = space.symbol("x", sympy.Integer(4))
    assert space.floordiv(sympy.Integer(-1), sympy.Integer(2)) == -1
    assert space.floordiv(x + 20, sympy.Integer(8)) == 2 + space.floordiv(x + 4, sympy.Integer(8)) == 2
    assert space.mod(sympy.Integer(-1), sympy.Integer(8)) == 7


def test_unknown_elements_are_not_bounded() -> None:
    space = Space()
    x = space.symbol("x", sympy.Integer(4))
    assert space.bounds(Read(0, 0, x) + x) is None
    assert not space.at_least(Read(0, 0, x), sympy.Integer(0))


def test_sizes_are_at_least_one_and_no_more_is_known() -> None:
    size, other = sympy.symbols("size other", integer=True, positive=True)
    space = Space()
    assert space.at_least(size * other, size)
    assert space.at_least(size, sympy.Integer(1))
    assert not space.at_least(size, sympy.Integer(2))
    assert not space.at_least(size, other)


def test_division_without_remainder() -> None:
    size = sympy.Symbol("size", integer=True, positive=True)
    assert divided(sympy.Integer(24), sympy.Integer(8)) == 3
    assert divided(sympy.Integer(20), sympy.Integer(8)) is None
    assert divided(size * 16, size * 8) == 2
    assert divided(size, sympy.Integer(8)) is None
    assert equal(size * (size + 1), size**2 + size)


def test_digits_of_a_packed_row() -> None:
    space = Space()
    head, dim = space.symbol("h", sympy.Integer(8)), space.symbol("d", sympy.Integer(128))
    digits = digits_of(space, head * 256 + dim + 128, sympy.Integer(2048), frozenset())
    assert digits is not None
    assert [(d.symbol, d.radix, d.start, d.length) for d in digits] == [(head, 8, 0, 8), (dim, 256, 128, 128)]
    assert [d.is_all for d in digits] == [True, False]


@pytest.mark.parametrize("case", ["too long", "overlapping", "no multiple"])
def test_digits_that_are_none(case: str) -> None:
    space = Space()
    x, y = space.symbol("x", sympy.Integer(4)), space.symbol("y", sympy.Integer(6))
    coord, size = {"too long": (x + 1, 4), "overlapping": (x * 4 + y, 16), "no multiple": (x * 4 + y * 6, 48)}[case]
    assert digits_of(space, coord, sympy.Integer(size), frozenset()) is None


@given(st.data())
def test_formulas_keep_their_truth(data: st.DataObject) -> None:
    space = Space()
    x, y = space.symbol("x", sympy.Integer(4)), space.symbol("y", sympy.Integer(5))
    atoms = [AtLeastZero(x - y), AtLeastZero(y - 2), Flag(x), AtLeastZero(1 - x)]

    def truth(formula: object, at: dict) -> bool:
        name = type(formula).__name__
        if name == "Truth":
            return formula.value
        if name == "AtLeastZero":
            return value(formula.expr, at) >= 0
        if name == "Flag":
            return value(formula.read, at) % 2 == 1
        if name == "Not":
            return not truth(formula.part, at)
        return (all if name == "And" else any)(truth(part, at) for part in formula.parts)

    def build(depth: int) -> tuple[object, object]:
        kind = data.draw(st.sampled_from(["atom", "and", "or", "not"] if depth else ["atom"]))
        if kind == "atom":
            atom = data.draw(st.sampled_from(atoms))
            return atom, lambda at: truth(atom, at)
        a, meaning_a = build(depth - 1)
        if kind == "not":
            return negated(a), lambda at: not meaning_a(at)
        b, meaning_b = build(depth - 1)
        if kind == "and":
            return all_of(a, b), lambda at: meaning_a(at) and meaning_b(at)
        return any_of(a, b), lambda at: meaning_a(at) or meaning_b(at)

    formula, meaning = build(3)
    for at in points(space):
        assert truth(formula, at) == meaning(at)
