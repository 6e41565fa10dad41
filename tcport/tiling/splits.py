"""How many CTAs share the keys of one sequence and KV head, so that a small batch still fills the device."""

from __future__ import annotations

import sympy

from tcport.ir import BATCH, CONTEXT, TOKENS, CeilDiv, Dim
from tcport.tiling.problem import Problem

# Two CTAs per unit hide each other's latencies; more only make more partial results.
_CTAS_PER_UNIT = 2
# A part shorter than this spends more on its start and its share of the merge than on keys.
_KEYS_PER_PART = 128
# Splits of few keys are short, as there is nothing else to do; a merge of many costs more than it gains.
_KEYS_PER_SPLIT, _FREE_SPLITS, _KEYS_PER_FURTHER_SPLIT = 64, 8, 80
# A merge takes as long as so many keys of a CTA, and so many more for each row of the result that a unit merges; by the
# cost model (:mod:`tcport.tiling.cost`), for seven shapes on three devices. A cut saves half of a sequence or more.
_KEYS_PER_MERGE, _KEYS_PER_MERGED_ROW = 64, 30
_MOST = 128
# Where keys are cut by the lengths of the batch: parts that let uneven lengths come out even.
_LEAST_PARTS = 3
# The bytes on their way that keep a memory busy, in seconds of its bandwidth; and of a unit, warps that have something
# to do while others wait, and CTAs beyond which there only are more partial results.
_IN_FLIGHT, _FEWEST_WARPS, _MOST_CTAS = 2.7e-6, 3, 5.5
# A batch-invariant call is cut for a batch of this size, whatever its batch is.
_INVARIANT_BATCH = 8


def split_count(problem: Problem, block_m: int, block_n: int, units: int, resident: int, *, invariant: bool) -> Dim:
    """The number of splits: an int, or an expression in the sizes that are open.

    The call's blocks times the splits shall be about two CTAs per unit, but not more than are resident at a time; and
    half of a sequence must take longer than the merge, else it stays whole.

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
    work, tokens = blocks * batch, batch
    if problem.kernel != "decode":  # as many blocks as equal lengths have; those that only may begin are empty
        tokens = TOKENS if problem.open_tokens else problem.num_tokens
        work = work * _ceil_div(tokens, max(1, block_m // problem.rows) * batch)
    context: Dim = CONTEXT if problem.open_context else problem.max_context
    shortest = _floor_div(context, max(_KEYS_PER_SPLIT, block_n))
    worthwhile = _FREE_SPLITS + _floor_div(context, _KEYS_PER_FURTHER_SPLIT)
    rows = problem.num_kv_heads * problem.rows * tokens
    merge = _KEYS_PER_MERGE + _ceil_div(_KEYS_PER_MERGED_ROW * rows, units)
    paid = _MOST * _floor_div(context, 2 * merge)  # 0 where it is not
    return _between(_ceil_div(wanted, work), _MOST, shortest, worthwhile, paid, _floor_div(room, work))


def part_count(problem: Problem, block_m: int, block_n: int, units: int, resident: int, busy: int) -> Dim:
    """Parts of a sequence on average, where a decode batch is cut by its lengths: an int, or an expression.

    As many as keep the memory busy, and three of a sequence at least, so that uneven lengths come out even;
    but no more than are resident at a time. A batch that fills more than half of that room with two of each gets what
    fills it twice: a second wave that is nearly empty costs as much as a full one. Measured on an H200 with 2 to 256
    sequences. Over 8-bit keys a batch that fills all of the room with two gets that too: a CTA waits for itself more
    than for memory, so the longest parts gain nothing from what the short ones leave (64 uneven lengths: 214 us with
    two parts, 172 us with four).

    Args:
        busy: CTAs that keep the memory busy, of :func:`busy_ctas`.
    """
    blocks = problem.num_kv_heads * -(-problem.rows // block_m)
    work = blocks * (BATCH if problem.open_batch else problem.num_seqs)
    context: Dim = CONTEXT if problem.open_context else problem.max_context
    wanted = _most(_LEAST_PARTS, _ceil_div(busy, work))
    room = _floor_div(resident * units, work)
    twice = _floor_div(2 * resident * units, work)
    # 1 where the room holds fewer than two of each (of 8 bits: than three), else 0.
    narrow = _least(1, _most(0, (3 if problem.quantised else 2) - room))
    return _most(2, _least(wanted, room, _floor_div(context, max(_KEYS_PER_PART, block_n))), narrow * twice)


def busy_ctas(tile_bytes: float, warps: int, stages: int, bandwidth: float, units: int) -> int:
    """CTAs of a device whose tiles on their way keep its memory busy.

    By Little's law that takes bandwidth times latency. Over 35 shapes on an H200, tiles of 8 to 64 KiB were fastest
    with a little over twice that, as CTAs do not ask all the time.

    Args:
        tile_bytes: keys and values of a tile.
        warps, stages: of a CTA, and tiles that it has buffers for.
        bandwidth: bytes a second.
        units: compute units.
    """
    ahead = min(2.0, stages - 1) or 0.75  # without a buffer in advance, a tile is on its way most of the time
    busy = _IN_FLIGHT * bandwidth / (tile_bytes * ahead)
    return int(max(units, _FEWEST_WARPS * units / warps, min(_MOST_CTAS * units, busy)))


def _between(wanted: Dim, *limits: Dim) -> Dim:
    """``wanted``, at least 1 and otherwise at most each limit; a number where one limit settles it."""
    if any(isinstance(limit, int) and limit <= 1 for limit in limits):
        return 1
    return _most(1, _least(wanted, *limits))


# Unevaluated: sympy would spend seconds on asking which of the sizes is the smallest.
def _most(*sizes: Dim) -> Dim:
    known = all(isinstance(size, int) for size in sizes)
    return max(sizes) if known else sympy.Max(*sizes, evaluate=False)  # type: ignore[type-var]


def _least(*sizes: Dim) -> Dim:
    known = all(isinstance(size, int) for size in sizes)
    return min(sizes) if known else sympy.Min(*sizes, evaluate=False)  # type: ignore[type-var]


def _ceil_div(a: Dim, b: Dim) -> Dim:
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else CeilDiv(a, b)  # type: ignore[return-value]


def _floor_div(a: Dim, b: Dim) -> Dim:
    """Said with the ceiling, which a traced size knows how to evaluate."""
    return _ceil_div(a + 1 - b, b)
