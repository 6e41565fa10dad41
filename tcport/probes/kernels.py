"""Short Triton kernels that show whether a capability is there and gives right numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, out, BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr):
    """``out = a @ b.T`` of square blocks; ``out`` holds sums in ``ACCUMULATE``."""
    row = tl.arange(0, BLOCK)
    at = row[:, None] * BLOCK + row[None, :]
    result = tl.dot(tl.load(a + at), tl.trans(tl.load(b + at)), out_dtype=ACCUMULATE)
    tl.store(out + at, result)


@triton.jit
def pipelined_sum(x, out, blocks, BLOCK: tl.constexpr):
    """``out = sum over blocks of x_block @ x_block.T``: with several stages, loads run ahead asynchronously."""
    row = tl.arange(0, BLOCK)
    at = row[:, None] * BLOCK + row[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for block in range(blocks):
        tile = tl.load(x + block * BLOCK * BLOCK + at)
        total = tl.dot(tile, tl.trans(tile), total)
    tl.store(out + at, total)


@triton.jit
def count_up(counter, BLOCK: tl.constexpr):
    """Every lane of every program adds 1 to one of ``BLOCK`` counters."""
    tl.atomic_add(counter + tl.arange(0, BLOCK), tl.full([BLOCK], 1.0, tl.float32).to(counter.dtype.element_ty))


@triton.jit
def meet(arrived, seen, programs):
    """Every program waits until all have arrived: it ends only where all of them run at once."""
    tl.atomic_add(arrived, 1)
    there = tl.atomic_add(arrived, 0)
    rounds = 0
    while (there < programs) & (rounds < 1000000):
        there = tl.atomic_add(arrived, 0)
        rounds += 1
    tl.store(seen + tl.program_id(0), there)
