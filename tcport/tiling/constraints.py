"""What a tile must keep, as sympy expressions that can be printed with the numbers in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import sympy

from tcport.ir import TileConfig
from tcport.tiling.limits import Limits
from tcport.tiling.problem import Problem

BM, BN, W, S = sympy.symbols("block_m block_n warps stages", positive=True, integer=True)
DK, DV, QB, KB, V = sympy.symbols("dim_qk dim_v query_bytes kv_bytes v_tiles", nonnegative=True, integer=True)
WARP = sympy.Symbol("warp_width", positive=True, integer=True)
LIMIT = sympy.Symbol("limit", positive=True, integer=True)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """``demand <= limit``.

    Attributes:
        name: what is limited, with its unit.
        demand: expression over the tile and the problem.
        limit: reads the limit out of the device's limits.
    """

    name: str
    demand: sympy.Expr
    limit: Callable[[Limits], int]

    def holds(self, values: dict[str, int], limits: Limits) -> bool:
        return self.evaluate(values) <= self.limit(limits)

    def evaluate(self, values: dict[str, int]) -> float:
        return _compiled(self.demand)(**{name: values[name] for name in _names(self.demand)})

    def explain(self, values: dict[str, int], limits: Limits) -> str:
        """The expression, the numbers, the result and the limit, on one line."""
        numbers = ", ".join(f"{name} {values[name]}" for name in _names(self.demand))
        demand, limit = self.evaluate(values), self.limit(limits)
        verdict = "<=" if demand <= limit else ">"
        return f"{self.name}: {self.demand} = {demand:g} {verdict} {limit} with {numbers}"


def constraints() -> tuple[Constraint, ...]:
    """Every constraint on a tile, most telling first."""
    return (
        Constraint("shared memory of a CTA, bytes", shared_bytes(), lambda limits: limits.shared_per_cta),
        Constraint("threads of a CTA", W * WARP, lambda limits: limits.threads_per_cta),
        Constraint("registers of a thread", registers(), lambda limits: limits.registers_per_thread),
    )


def shared_bytes() -> sympy.Expr:
    """K and V buffers of the pipeline and the Q tile.

    With page ids carried one tile ahead, Triton keeps ``stages - 1`` buffers of each operand; with no pipeline one
    tile still passes through shared memory on its way to the matrix operand layout.
    """
    return sympy.Max(S - 1, 1) * BN * (DK + V * DV) * KB + BM * DK * QB


def registers() -> sympy.Expr:
    """Live 32-bit registers of one thread: output accumulator, Q operand, logits and probabilities, addresses."""
    return (BM * DV + BM * DK * QB / 4 + 2 * BM * BN) / (W * WARP) + _OTHER_REGISTERS


def values_of(config: TileConfig, problem: Problem, limits: Limits) -> dict[str, int]:
    """The numbers of one config, by symbol name."""
    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "warps": config.num_warps,
        "stages": config.num_stages,
        "dim_qk": problem.dim_qk,
        "dim_v": problem.dim_v,
        "query_bytes": problem.query_bytes,
        "kv_bytes": problem.kv_bytes,
        "v_tiles": 0 if problem.v_is_view_of_k else 1,
        "warp_width": limits.warp_width,
    }


# Addresses, running maximum and sum, loop state: what compiled decode kernels hold beside their tiles.
_OTHER_REGISTERS = 40


@functools.cache
def _compiled(expression: sympy.Expr) -> Callable[..., float]:
    return sympy.lambdify([sympy.Symbol(n) for n in _names(expression)], expression.subs(_plain(expression)), "math")


@functools.cache
def _names(expression: sympy.Expr) -> tuple[str, ...]:
    return tuple(sorted(symbol.name for symbol in expression.free_symbols))


def _plain(expression: sympy.Expr) -> dict[sympy.Symbol, sympy.Symbol]:
    return {symbol: sympy.Symbol(symbol.name) for symbol in expression.free_symbols}
