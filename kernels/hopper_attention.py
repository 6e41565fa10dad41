# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""Paged attention for Hopper: pages by TMA, products by wgmma, softmax under the products. Written in Gluon.

A CTA takes one block of query rows, as a program of :mod:`tcport.kernels.triton_attention` does. Its warps are of two
kinds. One warp fetches (:mod:`tcport.kernels.hopper_fetch`): it reads the page ids of every tile and asks the copy
engine for its keys and values. The others, two groups of four warps with half of the rows each, multiply
(:mod:`tcport.kernels.hopper_multiply`). They meet at barriers in shared memory, a pair for every buffer of keys and of
values: "ready" is set by the copy engine once all bytes have come, "free" by both groups once they have read them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tcport.kernels.hopper_fetch import BOX_DIMS, fetch
from tcport.kernels.hopper_multiply import ROWS, multiply, visible

_SEGMENTS_AT_ONCE = gl.constexpr(256)


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "window", "table_stride_seq", "table_stride_page", "lens_stride", "cu_stride",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "cu_seqlens_q", "lse"],
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
):
    """One block of rows; see the module.

    Args:
        keys, values: descriptors of the caches as matrices whose rows are one token stride apart, in boxes of
            ``[BOX, 64]``. Token t of page p and head h begins at row ``p * page_rows + h * head_rows + t``, dim
            ``h * head_dims``.
        sign, scale: the sign of the factor on ``q.k`` (0 where it is 0) and its size.
        window: None for none.
        BOX: keys of a box: it divides the page size and ``BLOCK_N``.
    """
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    kv_head = gl.program_id(0) % NUM_KV_HEADS
    # Late blocks of a causal sequence are the heavy ones: start them first.
    block = gl.num_programs(0) // NUM_KV_HEADS - 1 - gl.program_id(0) // NUM_KV_HEADS
    seq, first_token, seq_end, seq_len = _find_tokens(
        block, cu_seqlens_q, cu_stride, seq_lens, lens_stride, num_seqs, num_tokens, TOKENS
    )
    count = gl.minimum(seq_end - first_token, TOKENS)
    if count <= 0:
        return
    first_position = seq_len - seq_end + first_token

    # Keys that some row sees, and among them those that every row sees. Tiles begin where a box does.
    begin, full_end = visible(first_position, seq_len, window, CAUSAL)
    full_begin, end = visible(first_position + count - 1, seq_len, window, CAUSAL)
    start = begin // BOX * BOX
    tiles = gl.maximum(gl.cdiv(end - start, BLOCK_N), 0)

    BOXES: gl.constexpr = BLOCK_N // BOX * (DIM // BOX_DIMS)
    dtype: gl.constexpr = keys.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    query_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], operand)
    key_boxes = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BOX, BOX_DIMS], operand)
    value_boxes = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BOX, BOX_DIMS], operand)
    key_ready, key_free = _barriers(STAGES)
    value_ready, value_free = _barriers(STAGES)

    boxes = (key_boxes, value_boxes)
    barriers = (key_ready, key_free, value_ready, value_free)
    span = (start, begin, full_begin, full_end, tiles)
    rows = (first_token, first_position, count, seq_len, window, kv_head)
    source = (query, query_stride_token, query_stride_head, sign)
    table = (block_table + seq.to(gl.int64) * table_stride_seq, table_stride_page)
    key_place = (k_page_rows, kv_head * k_head_rows, kv_head * k_head_dims)
    value_place = (v_page_rows, kv_head * v_head_rows, kv_head * v_head_dims)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    query_tiles, source, boxes, barriers, span, rows, scale, out, lse, 0,
                    NUM_KV_HEADS, GROUP, TOKENS, DIM, BLOCK_N, STAGES, CAUSAL,
                ),
            ),
            (
                multiply,
                (
                    query_tiles, source, boxes, barriers, span, rows, scale, out, lse, 1,
                    NUM_KV_HEADS, GROUP, TOKENS, DIM, BLOCK_N, STAGES, CAUSAL,
                ),
            ),
            (
                fetch,
                (
                    keys, values, boxes, barriers, (start, end, tiles), table, key_place, value_place,
                    PAGE_SIZE, DIM, BLOCK_N, BOX, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _find_tokens(block, cu_seqlens_q, cu_stride, seq_lens, lens_stride, num_seqs, num_tokens, TOKENS: gl.constexpr):
    """The sequence of a block (-1 and B for the rows before and behind all), the block's first token, and the
    sequence's end and length.

    Blocks are dealt out as in :mod:`tcport.kernels.triton_attention`. All comes out of the loads that count the
    sequences, begin and end as the last offset at or before the block and the first behind it: loads by the sequence's
    number would wait for them. Every warp looks at all sequences, so that no warp waits for another.
    """
    layout: gl.constexpr = gl.BlockedLayout([_SEGMENTS_AT_ONCE // 32], [32], [gl.num_warps()], [0])
    segments = block * 0
    seq_begin = segments
    seq_end = segments + num_tokens
    seq_len = segments
    for first in range(0, num_seqs + 2, _SEGMENTS_AT_ONCE):
        segment = first + gl.arange(0, _SEGMENTS_AT_ONCE, layout=layout)
        offset = segment - 1
        known = (offset >= 0) & (offset <= num_seqs)
        opens = gl.load(cu_seqlens_q + offset.to(gl.int64) * cu_stride, mask=known, other=0).to(gl.int32)
        length = gl.load(seq_lens + offset.to(gl.int64) * lens_stride, mask=known & (offset < num_seqs), other=0)
        before = known & (opens // TOKENS + segment <= block)
        more = gl.sum(before.to(gl.int32), 0)
        segments += more
        seq_begin = gl.maximum(seq_begin, gl.max(gl.where(before, opens, 0), 0))
        seq_end = gl.minimum(seq_end, gl.min(gl.where(known & (before == 0), opens, num_tokens), 0))
        # The block's own segment is the last that opens at or before it: its number is how many do.
        own = gl.max(gl.where(before & (segment == segments), length.to(gl.int32), 0), 0)
        seq_len = gl.where(more > 0, own, seq_len)
    return segments - 1, seq_begin + (block - seq_begin // TOKENS - segments) * TOKENS, seq_end, seq_len


@gluon.jit
def _barriers(BUFFERS: gl.constexpr):
    """A barrier for "ready", set by one, and a barrier for "free", set by two, of every buffer."""
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=2)
    return ready, free
