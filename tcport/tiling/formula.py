"""Expressions that can be read, printed with the numbers in, and evaluated fast."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import sympy


@dataclasses.dataclass(frozen=True)
class Formula:
    """A named sympy expression over named numbers.

    Attributes:
        unit: of its value, for people.
    """

    name: str
    expression: sympy.Expr
    unit: str = ""

    def __call__(self, values: Mapping[str, float]) -> float:
        """Its value; ``values`` may hold more names than it uses."""
        names, function = _compiled(self.expression)
        return function(*(values[name] for name in names))

    @property
    def symbol(self) -> sympy.Symbol:
        """Its name as a symbol, for formulas that build on it."""
        return size(self.name)

    def explain(self, values: Mapping[str, float]) -> str:
        """``name = expression = value unit`` and the numbers that went in."""
        return f"{self.name} = {_printed(self.expression)} = {self.result(values)} {self.numbers(values)}".rstrip()

    def result(self, values: Mapping[str, float]) -> str:
        """Its value with its unit."""
        return f"{shown(self(values))} {self.unit}".rstrip()

    def numbers(self, values: Mapping[str, float]) -> str:
        """The numbers that go in: ``(block_m=16, warps=4)``."""
        names, _ = _compiled(self.expression)
        return f"({', '.join(f'{name}={shown(values[name])}' for name in names)})" if names else ""


def shown(number: float) -> str:
    """A number for people: whole ones in full, others to four digits."""
    return str(int(number)) if float(number).is_integer() and abs(number) < 1e9 else f"{number:.4g}"


def size(name: str) -> sympy.Symbol:
    """A symbol for a number that is not negative."""
    return sympy.Symbol(name, nonnegative=True)


@functools.cache
def _compiled(expression: sympy.Expr) -> tuple[tuple[str, ...], Callable[..., float]]:
    symbols = sorted(expression.free_symbols, key=str)
    return tuple(map(str, symbols)), sympy.lambdify(symbols, expression, [{"CeilDiv": _ceil_div}, "math"])


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def _printed(expression: sympy.Expr) -> str:
    return str(expression)
