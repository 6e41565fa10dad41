"""How many CTAs share the keys of one sequence and KV head, so that a small batch still fills the device."""

from __future__ import annotations

import sympy

from tcport.ir import BATCH, CeilDiv, Dim
from tcport.tiling.formula import Formula
from tcport.tiling.problem import Problem

# Two CTAs per unit hide each other's latencies; more only make more partial results.
_CTAS_PER_UNIT = 2
# A split shorter than this spends more on its start and its share of the merge than on keys.
_KEYS_PER_SPLIT = 128
_MOST = 128
# A batch-invariant call is cut for a batch of this size, whatever its batch is.
_INVARIANT_BATCH = 8


def split_count(problem: Problem, block_m: int, block_n: int, units: int, resident: int, *, invariant: bool) -> Dim:
    """The number of splits: an int, or an expression in ``BATCH`` when the batch is open.

    The batch's blocks times the splits shall be about two CTAs per unit, but not more than are resident at a time.

    Args:
        units: compute units.
        resident: CTAs of this tile that one unit holds.
        invariant: the number must not depend on the batch.
    """
    if problem.kernel != "decode" and problem.open_batch:
        return 1
    blocks = problem.num_kv_heads * -(-problem.rows // block_m)
    if problem.kernel != "decode":
        # Blocks of query rows of all sequences, per sequence: a symbolic batch has returned above.
        tokens = max(1, block_m // problem.rows)
        blocks *= max(1, -(-(problem.num_tokens // tokens + problem.num_seqs) // problem.num_seqs))
    most = min(_MOST, max(1, problem.max_context // max(_KEYS_PER_SPLIT, block_n)))
    if problem.open_context:
        most = _MOST
    if invariant:
        return max(1, min(most, -(-_CTAS_PER_UNIT * units // (blocks * _INVARIANT_BATCH))))
    wanted, room = _CTAS_PER_UNIT * units, resident * units
    if not problem.open_batch:
        work = blocks * problem.num_seqs
        return max(1, min(most, -(-wanted // work), room // work))
    if most == 1:
        return 1
    work = blocks * BATCH
    if wanted <= room // 2:
        # Rounding up cannot exceed the room: it adds less than one more round of the blocks.
        return sympy.Max(1, sympy.Min(most, CeilDiv(wanted, work)))
    # floor(room / work), said with the ceiling that a traced batch size knows how to evaluate.
    return sympy.Max(1, sympy.Min(most, CeilDiv(room + 1 - work, work)))


def splits_at(splits: Dim, batch: int) -> int:
    """The number of splits at a batch of this size."""
    return splits if isinstance(splits, int) else int(Formula("splits", splits)({BATCH.name: batch}))
