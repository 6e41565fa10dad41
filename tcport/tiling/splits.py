"""How many CTAs share the keys of one sequence and KV head, so that a small batch still fills the device."""

from __future__ import annotations

import sympy

from tcport.ir import BATCH, CONTEXT, TOKENS, CeilDiv, Dim
from tcport.tiling.problem import Problem

# Two CTAs per unit hide each other's latencies; more only make more partial results.
_CTAS_PER_UNIT = 2
# A split shorter than this spends more on its start and its share of the merge than on keys.
_KEYS_PER_SPLIT = 128
_MOST = 128
# A batch-invariant call is cut for a batch of this size, whatever its batch is.
_INVARIANT_BATCH = 8


def split_count(problem: Problem, block_m: int, block_n: int, units: int, resident: int, *, invariant: bool) -> Dim:
    """The number of splits: an int, or an expression in the sizes that are open.

    The call's blocks times the splits shall be about two CTAs per unit, but not more than are resident at a time.

    Args:
        units: compute units.
        resident: CTAs of this tile that one unit holds.
        invariant: the number must not depend on the call's sizes.
    """
    blocks = problem.num_kv_heads * -(-problem.rows // block_m)
    wanted, room = _CTAS_PER_UNIT * units, resident * units
    if invariant:
        return 1 if problem.kernel != "decode" else _between(-(-wanted // (blocks * _INVARIANT_BATCH)), _MOST)
    batch: Dim = BATCH if problem.open_batch else problem.num_seqs
    work = blocks * batch
    if problem.kernel != "decode":  # each sequence may begin a block of its own
        tokens: Dim = TOKENS if problem.open_tokens else problem.num_tokens
        work = blocks * (_floor_div(tokens, max(1, block_m // problem.rows)) + batch)
    context: Dim = CONTEXT if problem.open_context else problem.max_context
    most = _floor_div(context, max(_KEYS_PER_SPLIT, block_n))
    return _between(_ceil_div(wanted, work), _MOST, most, _floor_div(room, work))


def _between(wanted: Dim, *limits: Dim) -> Dim:
    """``wanted``, at least 1 and otherwise at most each limit."""
    if all(isinstance(size, int) for size in (wanted, *limits)):
        return max(1, min(wanted, *limits))  # type: ignore[type-var]
    # Unevaluated: sympy would spend seconds on asking which of the sizes is the smallest.
    return sympy.Max(1, sympy.Min(wanted, *limits, evaluate=False), evaluate=False)


def _ceil_div(a: Dim, b: Dim) -> Dim:
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else CeilDiv(a, b)  # type: ignore[return-value]


def _floor_div(a: Dim, b: Dim) -> Dim:
    """Said with the ceiling, which a traced size knows how to evaluate."""
    return _ceil_div(a + 1 - b, b)
