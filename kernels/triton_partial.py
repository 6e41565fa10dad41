# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""What is left of each split of the keys until they are merged: records in scratch memory, one for a token of a split.

A record begins with a word for each head: the largest logit and the sum of weights relative to it. Not their LSE, in
which the sum would be lost where logits are huge: at 1e7, fp32 holds no digit behind the point, and a split would weigh
the same whatever number of keys it holds. The heads' outputs follow, in fp32.

All is one allocation, of which generated code works out one size: where sizes are open, the number of splits is a long
formula, which takes the host a microsecond each time it is written out. And words of heads lie together: next to each
head's output, where no more of a sector of 32 bytes was written, they cost a call 0.9 us on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcport.kernels.triton_tile import LN2

PLACE = tl.constexpr(4)
"""Words, a sector, of a sequence in the table that goes before the records of a batch cut by its lengths."""
NOTHING = tl.constexpr(-(1 << 55))
"""The word of a softmax over no keys: a maximum of -inf, a sum of 0."""


def record_words(num_heads: int, v_dim: int) -> int:
    """Words of 8 bytes of a record: an even number, so that each begins at a multiple of 16 bytes."""
    return (num_heads + 1) // 2 * 2 + (num_heads * v_dim + 3) // 4 * 2


@triton.jit
def in_record(scratch, number, head, NUM_HEADS: tl.constexpr, DIM_V: tl.constexpr, RECORD: tl.constexpr):
    """Where record ``number`` has the word of a head, and where that head's output begins."""
    first = scratch + number * RECORD
    outputs = (first + (NUM_HEADS + 1) // 2 * 2).to(tl.pointer_type(tl.float32), bitcast=True)
    return first + head, outputs + head * DIM_V


@triton.jit
def pack(upper, lower):
    """Two numbers of 32 bits in one word."""
    return (upper.to(tl.int32, bitcast=True).to(tl.int64) << 32) | lower.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def unpack(word, dtype: tl.constexpr):
    """The numbers that :func:`pack` was given."""
    return (word >> 32).to(tl.int32).to(dtype, bitcast=True), word.to(tl.int32).to(dtype, bitcast=True)


@triton.jit
def lse_of(maximum, denominator):
    """LSE of a softmax whose maximum is in base 2; -inf where it has no keys, with a maximum of -inf and a sum of 0."""
    return (maximum + tl.log2(denominator)) * LN2
