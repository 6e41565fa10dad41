"""Expressions that can be read, printed with the numbers in, and evaluated fast."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import sympy


@dataclasses.dataclass(frozen=True)
class Formula:
    """A named sympy expression over named numbers."""

    name: str
    expression: sympy.Expr

    def __call__(self, values: Mapping[str, float]) -> float:
        """Its value; ``values`` may hold more names than it uses."""
        names, function = _compiled(self.expression)
        return function(*(values[name] for name in names))

    def explain(self, values: Mapping[str, float]) -> str:
        """``name: expression = value`` and the numbers that went in."""
        names, _ = _compiled(self.expression)
        numbers = ", ".join(f"{name}={values[name]:g}" for name in names)
        return f"{self.name}: {_printed(self.expression)} = {self(values):.4g} with {numbers}"


def size(name: str) -> sympy.Symbol:
    """A symbol for a number that is not negative."""
    return sympy.Symbol(name, nonnegative=True)


@functools.cache
def _compiled(expression: sympy.Expr) -> tuple[tuple[str, ...], Callable[..., float]]:
    symbols = sorted(expression.free_symbols, key=lambda symbol: symbol.name)
    return tuple(symbol.name for symbol in symbols), sympy.lambdify(symbols, expression, "math")


@functools.cache
def _printed(expression: sympy.Expr) -> str:
    return str(expression)
