# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""Paged attention for Hopper: pages by TMA, products by wgmma, softmax under the products. Written in Gluon.

A CTA takes blocks of query rows one after the other (:mod:`tcport.kernels.hopper_blocks`). Its warps are of two kinds.
One warp fetches (:mod:`tcport.kernels.hopper_fetch`): it takes the next block, tells the others, reads the page ids of
every tile and asks the copy engine for its keys and values. The others, two groups of four warps with half of the rows
each, multiply (:mod:`tcport.kernels.hopper_multiply`). They meet at barriers in shared memory, a pair for every buffer
of keys, of values and of what is told: "ready" is set once all of it has come, "free" by both groups once they have
read it. So the first keys of a block are on their way while the last of the block before are multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tcport.kernels.hopper_blocks import TOLD
from tcport.kernels.hopper_fetch import BOX_DIMS, fetch
from tcport.kernels.hopper_multiply import ROWS, multiply


@gluon.jit(
    do_not_specialize=[
        "items", "num_seqs", "num_tokens", "window", "table_stride_seq", "table_stride_page", "lens_stride",
        "cu_stride",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "cu_seqlens_q", "lse", "counter"],
)  # fmt: skip
def hopper_attention_kernel(
    keys,
    values,
    query,
    block_table,
    seq_lens,
    cu_seqlens_q,
    out,
    lse,
    counter,
    items,
    num_seqs,
    num_tokens,
    sign,
    scale,
    window,
    query_stride_token,
    query_stride_head,
    k_page_rows,
    k_head_rows,
    k_head_dims,
    v_page_rows,
    v_head_rows,
    v_head_dims,
    table_stride_seq,
    table_stride_page,
    lens_stride,
    cu_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    FETCHING: gl.constexpr,
):
    """All blocks of rows, dealt out to the CTAs; see the module.

    Args:
        keys, values: descriptors of the caches as matrices whose rows are one token stride apart, in boxes of
            ``[BOX, 64]``. Token t of page p and head h begins at row ``p * page_rows + h * head_rows + t``, dim
            ``h * head_dims``.
        counter: int32, 0: how many blocks beyond one for each CTA have been taken. Not used where each has its own.
        items: blocks times KV heads; at least as many as CTAs.
        sign, scale: the sign of the factor on ``q.k`` (0 where it is 0) and its size.
        window: None for none.
        BOX: keys of a box: it divides the page size and ``BLOCK_N``.
        MULTIPLYING, FETCHING: registers of a thread of either kind.
    """
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    BOXES: gl.constexpr = BLOCK_N // BOX * (DIM // BOX_DIMS)
    dtype: gl.constexpr = keys.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], operand)
    key_boxes = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BOX, BOX_DIMS], operand)
    value_boxes = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BOX, BOX_DIMS], operand)
    told = gl.allocate_shared_memory(gl.int32, [2 * TOLD, 1], flat)
    key_ready, key_free = _barriers(STAGES)
    value_ready, value_free = _barriers(STAGES)
    told_ready, told_free = _barriers(2)

    boxes = (key_boxes, value_boxes)
    barriers = (key_ready, key_free, value_ready, value_free)
    telling = (told, told_ready, told_free)
    source = (query, query_stride_token, query_stride_head, sign)
    batch = (cu_seqlens_q, cu_stride, seq_lens, lens_stride, num_seqs, num_tokens)
    table = (block_table, table_stride_seq, table_stride_page)
    key_place = (k_page_rows, k_head_rows, k_head_dims)
    value_place = (v_page_rows, v_head_rows, v_head_dims)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    query_tiles, source, boxes, barriers, telling, scale, window, out, lse, 0,
                    NUM_KV_HEADS, GROUP, TOKENS, DIM, BLOCK_N, BOX, STAGES, CAUSAL,
                ),
            ),
            (
                multiply,
                (
                    query_tiles, source, boxes, barriers, telling, scale, window, out, lse, 1,
                    NUM_KV_HEADS, GROUP, TOKENS, DIM, BLOCK_N, BOX, STAGES, CAUSAL,
                ),
            ),
            (
                fetch,
                (
                    keys, values, boxes, barriers, telling, batch, table, key_place, value_place, counter, items,
                    window, NUM_KV_HEADS, TOKENS, PAGE_SIZE, DIM, BLOCK_N, BOX, STAGES, CAUSAL,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLYING, FETCHING],
    )  # fmt: skip


@gluon.jit
def _barriers(BUFFERS: gl.constexpr):
    """A barrier for "ready", set by one, and a barrier for "free", set by two, of every buffer."""
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=2)
    return ready, free
