# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""The warps of the Hopper kernel that multiply: four of them, with 64 query rows, against every tile of keys.

The order of products and softmax is that of FlashAttention-3 (arXiv:2407.08608, algorithm 2): the softmax of a tile
(:mod:`tcport.kernels.hopper_softmax`) runs while the tensor cores multiply the weights of the tile before with its
values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tcport.kernels.gluon_names import barrier, reinterpret
from tcport.kernels.hopper_blocks import heard, span, visible
from tcport.kernels.hopper_softmax import LN2, LOG2E, nothing_seen, rescaled, softmax, sum_by_thread

ROWS = gl.constexpr(64)  # of a group of four warps: the height of a wgmma


@gluon.jit
def multiply(
    query_tiles, source, boxes, barriers, telling, scale, window, out, lse, group: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attend with one half of the rows of every block that is told of, and store the results.

    The two groups run on their own: when one takes its softmax, the tensor cores are left to the other. Making them
    take turns, as FlashAttention-3 does, was tried on an H200 and gained nothing; nor did a second warp that fetches,
    or a third buffer of keys.
    """
    query_tile = query_tiles.index(group)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    factor = scale * LOG2E
    number = gl.program_id(0) * 0
    done = number  # tiles of the blocks before
    block = heard(telling, number)
    _bring_queries(query_tile, source, block, group, GROUP, TOKENS, DIM, wide)
    while block[0] > 0:
        tiles = span(block, window, BLOCK_N, BOX, CAUSAL)[5]
        mine = tiles
        if group == 1 and GROUP <= ROWS:  # noqa: SIM102 - known to the compiler, and what follows is not
            # A single token's rows are all the first group's: that one waits for memory then, and not for this one.
            if block[0] * GROUP <= ROWS:
                _pass_over(barriers, done, tiles, STAGES)
                mine = tiles * 0
        result, denominator, log_maximum = _attend(
            query_tile, boxes, barriers, block, done, mine, window, factor, group,
            GROUP, DIM, BLOCK_N, BOX, STAGES, CAUSAL,
        )  # fmt: skip
        token, head, valid = _rows(block, group, GROUP, TOKENS, gl.SliceLayout(1, wide))
        target = token * (NUM_KV_HEADS * GROUP) + head
        dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
        share = gl.convert_layout(gl.where(denominator > 0, denominator, 1.0), gl.SliceLayout(1, result.type.layout))
        stored = gl.convert_layout((result * (1.0 / share)[:, None]).to(out.dtype.element_ty), wide)
        gl.store(out + target[:, None] * DIM + dim[None, :], stored, mask=valid[:, None])
        if lse is not None:
            log_sum = (log_maximum + gl.log2(denominator)) * LN2
            gl.store(lse + target, gl.convert_layout(log_sum, gl.SliceLayout(1, wide)), mask=valid)
        number += 1
        done += tiles
        block = heard(telling, number)
        # Here and not where it is needed: what says where rows lie would stay in registers through all tiles.
        _bring_queries(query_tile, source, block, group, GROUP, TOKENS, DIM, wide)


@gluon.jit
def _bring_queries(
    query_tile, source, block, group: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr,
    wide: gl.constexpr,
):  # fmt: skip
    """One group's queries of a block into shared memory; zeros for rows that are not there."""
    query, stride_token, stride_head, sign = source
    token, head, valid = _rows(block, group, GROUP, TOKENS, gl.SliceLayout(1, wide))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    pointers = query + token * stride_token + head.to(gl.int64) * stride_head
    loaded = gl.load(pointers[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
    # The factor's sign goes into the query, so that the largest product is the largest logit.
    query_tile.store((loaded.to(gl.float32) * sign).to(query_tile.dtype))
    fence_async_shared()


@gluon.jit
def _rows(block, group: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Token and query head of a group's rows, and whether there are such; of a row that is not there, another's."""
    count, first_token, _, _, kv_head = block
    row = group * ROWS + gl.arange(0, ROWS, layout=layout)
    token = (first_token + gl.maximum(gl.minimum(row // GROUP, count - 1), 0)).to(gl.int64)
    return token, kv_head * GROUP + row % GROUP, (row // GROUP < count) & (row < TOKENS * GROUP)


@gluon.jit
def _pass_over(barriers, done, tiles, STAGES: gl.constexpr):
    """Free every buffer of a block unread, one as it comes: a barrier must not be passed twice for one buffer."""
    key_ready, key_free, value_ready, value_free = barriers
    for tile in range(tiles):
        now = done + tile
        stage = now % STAGES
        mbarrier.wait(key_ready.index(stage), now // STAGES & 1)
        mbarrier.arrive(key_free.index(stage))
        mbarrier.wait(value_ready.index(stage), now // STAGES & 1)
        mbarrier.arrive(value_free.index(stage))


@gluon.jit
def _attend(
    query_tile, boxes, barriers, block, done, tiles, window, factor, group: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Sums ``[rows, DIM]`` of the values by weight, of the weights, and what these are relative to, in powers of 2."""
    dtype: gl.constexpr = query_tile.dtype
    WARPS: gl.constexpr = gl.num_warps()
    logit_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    key_ready, key_free, value_ready, value_free = barriers
    key_tiles = _as_tiles(boxes[0], STAGES, BLOCK_N, DIM)
    value_tiles = _as_tiles(boxes[1], STAGES, BLOCK_N, DIM)
    count, _, first_position, seq_len, _ = block
    start, begin, _, full_begin, full_end, _ = span(block, window, BLOCK_N, BOX, CAUSAL)
    row = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, logit_layout))
    position = first_position + gl.minimum(row // GROUP, count - 1)
    row_begin, row_end = visible(position, seq_len, window, CAUSAL)
    seen = (full_begin, full_end, row_begin, row_end)
    maximum, subtrahend = nothing_seen(factor, ROWS, gl.SliceLayout(1, logit_layout))
    result = gl.zeros([ROWS, DIM], gl.float32, out_layout)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, logit_layout)
    sums = sum_by_thread(nothing)
    if tiles > 0:
        stage = done % STAGES
        mbarrier.wait(key_ready.index(stage), done // STAGES & 1)
        logits = warpgroup_mma(query_tile, key_tiles.index(stage).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(key_free.index(stage))
        weights, rescale, maximum, subtrahend, sums = softmax(
            logits, start, seen, maximum, subtrahend, sums, factor, window is not None
        )
        weights = gl.convert_layout(weights.to(dtype), weight_layout)
        after = done + 1
        mbarrier.wait(key_ready.index(after % STAGES), after // STAGES & 1, pred=tiles > 1)
        if start < begin:
            mbarrier.wait(value_ready.index(stage), done // STAGES & 1)
            _erase(value_tiles.index(stage), start, begin, seq_len, BLOCK_N, DIM)
            barrier()  # here, so that no round of the loop does
        for tile in range(1, tiles):
            now = done + tile
            stage = now % STAGES
            before = (now - 1) % STAGES
            logits = warpgroup_mma(
                query_tile, key_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            mbarrier.wait(value_ready.index(before), (now - 1) // STAGES & 1)
            # Rescale under the products with the keys: behind those with the values nothing would hide it. The wait is
            # for all products but one, and only that one is pending: it keeps the compiler from rescaling sooner.
            result = warpgroup_mma_wait(1, deps=(result,))
            result = rescaled(result, gl.convert_layout(rescale, gl.SliceLayout(1, out_layout)))
            result = warpgroup_mma(weights, value_tiles.index(before), result, is_async=True)
            logits = warpgroup_mma_wait(1, deps=(logits,))
            next_weights, rescale, maximum, subtrahend, sums = softmax(
                logits, start + tile * BLOCK_N, seen, maximum, subtrahend, sums, factor, window is not None
            )
            next_weights = gl.convert_layout(next_weights.to(dtype), weight_layout)
            # This wait of the next round stands here because it is a loop: the assembler moves the softmax
            # across a wait for products, which it is to run under, and not across a loop.
            after = now + 1
            mbarrier.wait(key_ready.index(after % STAGES), after // STAGES & 1, pred=tile + 1 < tiles)
            result, weights = warpgroup_mma_wait(0, deps=(result, weights))
            # The four warps meet to free a buffer: for keys and values at once, and not between products and softmax.
            mbarrier.arrive(value_free.index(before))
            mbarrier.arrive(key_free.index(stage))
            weights = next_weights
        now = done + tiles - 1
        final = now % STAGES
        past = start + (tiles - 1) * BLOCK_N
        mbarrier.wait(value_ready.index(final), now // STAGES & 1)
        if (past < begin) | (past + BLOCK_N > seq_len):
            _erase(value_tiles.index(final), past, begin, seq_len, BLOCK_N, DIM)
        result *= gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        result = warpgroup_mma(weights, value_tiles.index(final), result)
        mbarrier.arrive(value_free.index(final))
    return result, gl.convert_layout(gl.sum(sums, 1), maximum.type.layout), maximum * factor


@gluon.jit
def _as_tiles(boxes, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """The boxes of the buffers as tiles: their halves lie one behind the other, as in a swizzled tile of that width."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape: gl.constexpr = [STAGES, BLOCK_N, DIM]
    return reinterpret(boxes, boxes.dtype, shape, layout)


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
