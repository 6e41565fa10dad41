# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""Cutting the keys of a decode batch on the device, by lengths that only the device knows.

A batch of B sequences is cut into at most N parts of one length, so that every program has about the same work,
whatever the lengths are. Each program works out the cut by itself from ``seq_lens``: there is no kernel before it that
plans, and nothing that a replayed graph could hold on to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcport.kernels.triton_span import visible_range

# Keys. A shorter part spends more on its start and its share of the merge than on keys.
_SHORTEST = tl.constexpr(128)


@triton.jit
def visible_tiles(lens, window, chunk, mask_columns, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Tiles of keys that the last token of each sequence sees."""
    begin, end = visible_range(lens - 1, lens, window, chunk, mask_columns, CAUSAL)
    return tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)


@triton.jit
def part_length(total, most, num_seqs, QUARTERS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of a part, where last parts of sequences are taken to lack QUARTERS quarters of their tiles.

    With four quarters, the parts of all sequences are at most ``most``; with none, they are as short as can be, and not
    too many where every sequence is a whole number of parts, as in a batch of equal lengths.
    """
    whole = tl.maximum(most - num_seqs * QUARTERS // 4, 1)
    return tl.maximum(tl.cdiv(total, whole), tl.cdiv(_SHORTEST, BLOCK_N))


@triton.jit
def parts_of(tiles, length):
    """Parts of sequences of so many tiles: one at least, which writes the zeros of a sequence without keys."""
    return tl.maximum(tl.cdiv(tiles, length), 1)
