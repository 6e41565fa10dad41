# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""The warps of the Hopper kernel that multiply: four of them, with 64 query rows, against every tile of keys.

Softmax is the online one of FlashAttention (arXiv:2205.14135, algorithm 1) in base 2; the order of products and
softmax is that of FlashAttention-3 (arXiv:2407.08608, algorithm 2): the softmax of a tile runs while the tensor cores
multiply the weights of the tile before with its values.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tcport.kernels.gluon_names import barrier, reinterpret

ROWS = gl.constexpr(64)  # of a group of four warps: the height of a wgmma
_KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_LAST_PLACE = gl.constexpr(2.0**-23)  # one to two units in the last place of an fp32 number, relative to it


@gluon.jit
def multiply(
    query_tiles, source, boxes, barriers, span, rows, scale, out, lse, group: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attend with one half of the rows of a block, and store the results.

    The two groups run on their own: when one takes its softmax, the tensor cores are left to the other. Making them
    take turns, as FlashAttention-3 does, was tried on an H200 and gained nothing.
    """
    dtype: gl.constexpr = query_tiles.dtype
    WARPS: gl.constexpr = gl.num_warps()
    logit_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    key_ready, key_free, value_ready, value_free = barriers
    key_tiles = _as_tiles(boxes[0], STAGES, BLOCK_N, DIM)
    value_tiles = _as_tiles(boxes[1], STAGES, BLOCK_N, DIM)
    query_tile = query_tiles.index(group)
    first_token, first_position, count, seq_len, window, kv_head = rows
    start, begin, full_begin, full_end, tiles = span

    wide_row = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    valid = (wide_row // GROUP < count) & (wide_row < TOKENS * GROUP)
    token = (first_token + gl.minimum(wide_row // GROUP, count - 1)).to(gl.int64)
    head = kv_head * GROUP + wide_row % GROUP
    pointers = source[0] + token * source[1] + head.to(gl.int64) * source[2]
    loaded = gl.load(pointers[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
    # The factor's sign goes into the query, so that the largest product is the largest logit.
    query_tile.store((loaded.to(gl.float32) * source[3]).to(dtype))
    fence_async_shared()

    row = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, logit_layout))
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, logit_layout))
    position = first_position + gl.minimum(row // GROUP, count - 1)
    row_begin, row_end = visible(position, seq_len, window, CAUSAL)
    factor = scale * _LOG2E
    maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, logit_layout))
    result = gl.zeros([ROWS, DIM], gl.float32, out_layout)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, logit_layout)
    sums = _sum_by_thread(nothing)
    if tiles > 0:
        mbarrier.wait(key_ready.index(0), 0)
        logits = warpgroup_mma(query_tile, key_tiles.index(0).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(key_free.index(0))
        weights, rescale, maximum, sums = _softmax(
            logits, start, full_begin, full_end, row_begin, row_end, column, maximum, sums, factor
        )
        weights = gl.convert_layout(weights.to(dtype), weight_layout)
        mbarrier.wait(key_ready.index(1 % STAGES), 1 // STAGES & 1, pred=tiles > 1)
        if start < begin:
            mbarrier.wait(value_ready.index(0), 0)
            _erase(value_tiles.index(0), start, begin, seq_len, BLOCK_N, DIM)
            barrier()  # here, so that no round of the loop does
        for tile in range(1, tiles):
            stage = tile % STAGES
            before = (tile - 1) % STAGES
            mbarrier.wait(value_ready.index(before), (tile - 1) // STAGES & 1)
            logits = warpgroup_mma(
                query_tile, key_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            # Rescale under the products with the keys: behind those with the values nothing would hide it. The wait is
            # for all products but one, and only that one is pending: it keeps the compiler from rescaling sooner.
            result = warpgroup_mma_wait(1, deps=(result,))
            result *= gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
            result = warpgroup_mma(weights, value_tiles.index(before), result, is_async=True)
            logits = warpgroup_mma_wait(1, deps=(logits,))
            next_weights, rescale, maximum, sums = _softmax(
                logits, start + tile * BLOCK_N, full_begin, full_end, row_begin, row_end, column, maximum, sums, factor
            )
            next_weights = gl.convert_layout(next_weights.to(dtype), weight_layout)
            # This wait of the next round stands here because it is a loop: the assembler moves the softmax
            # across a wait for products, which it is to run under, and not across a loop.
            after = tile + 1
            mbarrier.wait(key_ready.index(after % STAGES), after // STAGES & 1, pred=after < tiles)
            result, weights = warpgroup_mma_wait(0, deps=(result, weights))
            # The four warps meet to free a buffer: for keys and values at once, and not between products and softmax.
            mbarrier.arrive(value_free.index(before))
            mbarrier.arrive(key_free.index(stage))
            weights = next_weights
        final = (tiles - 1) % STAGES
        past = start + (tiles - 1) * BLOCK_N
        mbarrier.wait(value_ready.index(final), (tiles - 1) // STAGES & 1)
        if (past < begin) | (past + BLOCK_N > seq_len):
            _erase(value_tiles.index(final), past, begin, seq_len, BLOCK_N, DIM)
        result *= gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        result = warpgroup_mma(weights, value_tiles.index(final), result)
    denominator = gl.convert_layout(gl.sum(sums, 1), maximum.type.layout)
    target = token * (NUM_KV_HEADS * GROUP) + head
    share = gl.convert_layout(gl.where(denominator > 0, denominator, 1.0), gl.SliceLayout(1, out_layout))
    result = gl.convert_layout((result * (1.0 / share)[:, None]).to(out.dtype.element_ty), wide)
    gl.store(out + target[:, None] * DIM + dim[None, :], result, mask=valid[:, None])
    if lse is not None:
        log_sum = (maximum * factor + gl.log2(denominator)) * _LN2
        gl.store(lse + target, gl.convert_layout(log_sum, gl.SliceLayout(1, wide)), mask=valid)


@gluon.jit
def _as_tiles(boxes, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """The boxes of the buffers as tiles: their halves lie one behind the other, as in a swizzled tile of that width."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape: gl.constexpr = [STAGES, BLOCK_N, DIM]
    return reinterpret(boxes, boxes.dtype, shape, layout)


@gluon.jit
def visible(position, seq_len, window, CAUSAL: gl.constexpr):
    """Half-open interval of the keys that a query at ``position`` sees."""
    begin = position * 0
    end = begin + seq_len
    if CAUSAL:
        end = gl.minimum(end, position + 1)
    if window is not None:
        begin = gl.maximum(begin, position - window + 1)
    return begin, end


@gluon.jit
def _softmax(logits, start, full_begin, full_end, row_begin, row_end, column, maximum, sums, factor):
    """Weights of one tile's products, the factor on what was summed before, and the new maximum and sums."""
    if (start + logits.shape[1] > full_end) | (start < full_begin):
        key = start + column
        seen = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
        logits = gl.where(seen, logits, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(logits, 1))
    # A row that has seen no key yet: keep -inf - -inf from becoming NaN.
    reference = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    # One instruction multiplies a logit and subtracts, rounding once; what it subtracts is a product rounded before. Of
    # huge logits that leaves the maximum far from 0, on either side: a weight of 0, or infinity. With a subtrahend that
    # is lower by a unit in the last place it is left at or above 0, and cut off there: a weight of 1. NaN stays NaN.
    lowered = reference * factor
    lowered -= gl.abs(lowered) * _LAST_PLACE
    weights = gl.exp2(gl.minimum(logits * factor - lowered[:, None], 0.0, propagate_nan=_KEEP_NAN))
    # The difference first: exactly 1 while the maximum stays.
    rescale = gl.exp2((maximum - reference) * factor)
    more = _sum_by_thread(weights)
    sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, more.type.layout))[:, None] + more
    return weights, rescale, new_maximum, sums


@gluon.jit
def _sum_by_thread(tile):
    """Sums ``[rows, 4]`` of what each of the four threads that share a row holds of it: two columns of every eight.

    What one thread has needs no exchange; the four are summed once, behind the last tile.
    """
    return gl.sum(gl.sum(gl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def _erase(values, start, begin, end, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Zeros for the values outside ``[begin, end)``: what lies there may be NaN, and 0 times NaN would be summed."""
    PART: gl.constexpr = 16  # rows at a time, to need few registers beside those of the accumulator
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, PART):
        part = values.slice(first, PART)
        key = start + first + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        inside = (key >= begin) & (key < end)
        part.store(gl.where(inside[:, None], part.load(layout), 0.0))
    fence_async_shared()
