# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""Which keys a block of query rows visits: intervals of positions, cut by what rows see, by splits and by tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible_range(position, seq_len, window, chunk, mask_columns, CAUSAL: tl.constexpr):
    """Half-open interval of keys that a query at ``position`` sees; both ends never fall as the position grows."""
    begin = position * 0
    end = begin + seq_len
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    if window is not None:
        begin = tl.maximum(begin, position - window + 1)
    if chunk is not None:
        first = position // chunk * chunk
        begin = tl.maximum(begin, first)
        # Integer division rounds towards zero; a negative position (more queries than keys) lies in no chunk of keys.
        end = tl.where(position < 0, 0, tl.minimum(end, first + chunk))
    if mask_columns is not None:
        end = tl.minimum(end, mask_columns)
    return begin, end


@triton.jit
def split_span(begin, end, split, num_splits, BLOCK_N: tl.constexpr):
    """The part of keys ``[begin, end)`` that one split visits: a whole number of tiles, as even as can be.

    It depends on this interval and on the number of splits alone, so a constant number makes a result independent of
    the rest of the batch.
    """
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    # The first splits get the tiles that are left over: one division in 32 bits, which every program waits for.
    each = tiles // num_splits
    more = tiles - each * num_splits
    first = split * each + tl.minimum(split, more)
    last = first + each + (split < more).to(tl.int32)
    return begin + first * BLOCK_N, tl.minimum(begin + last * BLOCK_N, end)


@triton.jit
def main_span(begin, end, full_begin, full_end, BLOCK_N: tl.constexpr):
    """The tiles of ``[begin, end)`` that lie within ``[full_begin, full_end)``, where no row needs a mask."""
    skipped = tl.cdiv(tl.maximum(full_begin - begin, 0), BLOCK_N)
    main_begin = tl.minimum(begin + skipped * BLOCK_N, tl.maximum(begin, end))
    whole = tl.maximum(tl.minimum(full_end, end) - main_begin, 0) // BLOCK_N
    return main_begin, main_begin + whole * BLOCK_N
