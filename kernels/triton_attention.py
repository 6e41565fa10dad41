# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""The paged attention kernel: which query rows a program takes, and where its result goes.

Program ``(x, y)`` handles one KV head (x, fastest, so that neighbours read neighbouring heads of a page), one block of
query rows (x) and one split of the keys (y). Without ``cu_seqlens_q`` a block is the one token of one sequence;
with it, up to ``BLOCK_M // GROUP`` tokens of one sequence, found on the device. Results go to ``out [T, Hq, Dv]`` and
``lse [T, Hq]``, both contiguous, or with several splits to records of ``scratch``
(:mod:`tcport.kernels.triton_partial`), those of split y to number ``y * T + token``.

With ``PARTS`` the device cuts the keys of one-token sequences by their lengths, which no host reads: x names one part
of one sequence (:mod:`tcport.kernels.triton_parts`). A sequence of one part goes to ``out`` and ``lse``, parts of
others to the record of their number. Scratch memory begins with a table then, ``[B, PLACE]``: each word of a sequence
holds its first part and how many there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcport.kernels.triton_partial import PLACE, in_record, lse_of, pack
from tcport.kernels.triton_parts import part_length, parts_of, visible_tiles
from tcport.kernels.triton_span import main_span, split_span, visible_range
from tcport.kernels.triton_tile import LOG2E, attend, finish, load_query, to_fp16

_SEGMENTS_AT_ONCE = tl.constexpr(256)
_LENGTHS_AT_ONCE = tl.constexpr(128)


@triton.jit(
    # What changes from step to step must not select another binary: sizes, tables and their alignment.
    do_not_specialize=[
        "num_seqs", "num_tokens", "num_splits", "mask_columns", "window", "chunk",
        "table_stride_seq", "table_stride_page", "lens_stride", "cu_stride", "mask_stride_token",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "cu_seqlens_q", "mask", "alibi_slopes", "sinks", "k_scale", "v_scale", "lse",
    ],
)  # fmt: skip
def paged_attention_kernel(
    query,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    cu_seqlens_q,
    out,
    lse,
    scratch,
    alibi_slopes,
    sinks,
    k_scale,
    v_scale,
    mask,
    num_seqs,
    num_tokens,
    num_splits,
    scale,
    softcap,
    window,
    chunk,
    mask_columns,
    query_stride_token,
    query_stride_head,
    query_stride_dim,
    k_stride_page,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_page,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    table_stride_seq,
    table_stride_page,
    lens_stride,
    cu_stride,
    alibi_stride,
    sinks_stride,
    k_scale_stride_page,
    k_scale_stride_token,
    k_scale_stride_head,
    v_scale_stride_page,
    v_scale_stride_token,
    v_scale_stride_head,
    mask_stride_token,
    mask_stride_key,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_IS_K: tl.constexpr,
    V_LIKE_K: tl.constexpr,
    K_TOKEN_SCALE: tl.constexpr,
    V_TOKEN_SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP32: tl.constexpr,
    FP16: tl.constexpr,
    V_PAIRS: tl.constexpr,
    RECORD: tl.constexpr,
    PARTS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One block of rows, one split of the keys; see the module. None stands for an option that is not used.

    Args:
        num_splits: of every sequence; not used with ``PARTS``, where the grid has a program for the most parts that
            all sequences may have.
        RECORD: words of a record.
        MERGED: the merge is launched as soon as all programs have begun; see :mod:`tcport.kernels.triton_combine`.
    """
    if MERGED:
        tl.extra.cuda.gdc_launch_dependents()
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    HEADS: tl.constexpr = GROUP if HEAD_BLOCKS == 1 else BLOCK_M
    TOKENS: tl.constexpr = 1 if cu_seqlens_q is None else BLOCK_M // HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    head_block = tl.program_id(0) // NUM_KV_HEADS % HEAD_BLOCKS
    block = tl.program_id(0) // (NUM_KV_HEADS * HEAD_BLOCKS)
    split = tl.program_id(1)

    part = block
    if PARTS:
        # (Loads stand here and not in a function of their own for the reason given below.)
        most = tl.num_programs(0) // (NUM_KV_HEADS * HEAD_BLOCKS)
        total = block * 0
        for first in range(0, num_seqs, _LENGTHS_AT_ONCE):
            seqs = first + tl.arange(0, _LENGTHS_AT_ONCE)
            lens = tl.load(seq_lens + seqs.to(tl.int64) * lens_stride, mask=seqs < num_seqs, other=0).to(tl.int32)
            total += tl.sum(visible_tiles(lens, window, chunk, mask_columns, BLOCK_N, CAUSAL), 0)
        # The shortest of three lengths of which there are not too many parts; of the longest there never are.
        length_0 = part_length(total, most, num_seqs, 0, BLOCK_N)
        length_2 = part_length(total, most, num_seqs, 2, BLOCK_N)
        length_4 = part_length(total, most, num_seqs, 4, BLOCK_N)
        number_0, number_2 = block * 0, block * 0
        for first in range(0, num_seqs, _LENGTHS_AT_ONCE):
            seqs = first + tl.arange(0, _LENGTHS_AT_ONCE)
            lens = tl.load(seq_lens + seqs.to(tl.int64) * lens_stride, mask=seqs < num_seqs, other=0).to(tl.int32)
            tiles = visible_tiles(lens, window, chunk, mask_columns, BLOCK_N, CAUSAL)
            number_0 += tl.sum(tl.where(seqs < num_seqs, parts_of(tiles, length_0), 0), 0)
            number_2 += tl.sum(tl.where(seqs < num_seqs, parts_of(tiles, length_2), 0), 0)
        length = tl.where(number_2 <= most, length_2, length_4)
        length = tl.where(number_0 <= most, length_0, length)
        begun, split, count = block * 0, block * 0, block * 0
        # From 1 on, as Triton 3.7 looks at the division by it before it looks at the loop, and fails at a 0.
        block, num_splits = block * 0, block * 0 + 1
        for first in range(0, num_seqs, _LENGTHS_AT_ONCE):
            seqs = first + tl.arange(0, _LENGTHS_AT_ONCE)
            lens = tl.load(seq_lens + seqs.to(tl.int64) * lens_stride, mask=seqs < num_seqs, other=0).to(tl.int32)
            tiles = visible_tiles(lens, window, chunk, mask_columns, BLOCK_N, CAUSAL)
            numbers = tl.where(seqs < num_seqs, parts_of(tiles, length), 0)
            ends = begun + tl.cumsum(numbers, 0)
            here = (part < ends) & (part >= ends - numbers)
            count += tl.sum(here.to(tl.int32), 0)
            block += tl.sum(tl.where(here, seqs, 0), 0)
            split += tl.sum(tl.where(here, part - (ends - numbers), 0), 0)
            num_splits += tl.sum(tl.where(here, numbers - 1, 0), 0)
            begun += tl.sum(numbers, 0)
        seq, seq_end, first_token = block, block + 1, block
        covered = count > 0
    elif cu_seqlens_q is None:
        seq, seq_end, first_token = block, block + 1, block
        covered = block < num_seqs
        count = covered.to(tl.int32)
    else:
        # Late blocks of a causal sequence are the heavy ones: start them first.
        block = tl.num_programs(0) // (NUM_KV_HEADS * HEAD_BLOCKS) - 1 - block
        # The tokens before cu[0] and from cu[B] on form two more segments, "sequences" -1 and B, so that every row of
        # the output is written. Segment j, counted from 0, owns the blocks from begin(j) // TOKENS + j on: enough for
        # any lengths, in T // TOKENS + B + 2 blocks in all; those left over start behind their segment's end. The
        # segment is found by counting the segments whose blocks begin at or before this one: independent loads, where
        # a binary search waits for each of its loads in turn. (In a function of its own, torch's analysis of what a
        # kernel mutates would take cu_seqlens_q for written, as the address of the output depends on the result.)
        segments = block * 0
        for first in range(0, num_seqs + 2, _SEGMENTS_AT_ONCE):
            segment = first + tl.arange(0, _SEGMENTS_AT_ONCE)
            known = (segment > 0) & (segment < num_seqs + 2)
            begin = tl.load(cu_seqlens_q + (segment - 1).to(tl.int64) * cu_stride, mask=known, other=0).to(tl.int32)
            segments += tl.sum((known & (begin // TOKENS + segment <= block)).to(tl.int32), 0)
        seq = segments - 1
        covered = (seq >= 0) & (seq < num_seqs)
        next_cu = cu_seqlens_q + segments.to(tl.int64) * cu_stride
        seq_begin = tl.load(next_cu - cu_stride, mask=seq >= 0, other=0).to(tl.int32)
        seq_end = tl.load(next_cu, mask=seq < num_seqs, other=num_tokens).to(tl.int32)
        seq_end = tl.minimum(seq_end, num_tokens)
        first_token = seq_begin + (block - seq_begin // TOKENS - segments) * TOKENS
        count = tl.minimum(seq_end - first_token, TOKENS)
    if count <= 0:
        return
    seq_len = tl.load(seq_lens + seq.to(tl.int64) * lens_stride, mask=covered, other=0).to(tl.int32)

    row = tl.arange(0, BLOCK_M)
    token = row // HEADS
    head = head_block * HEADS + row % HEADS
    valid = (token < count) & (head < GROUP) & (row < TOKENS * HEADS)
    token = tl.minimum(token, count - 1)
    q_head = kv_head * GROUP + tl.minimum(head, GROUP - 1)
    first_position = seq_len - seq_end + first_token
    position = first_position + token
    token = (first_token + token).to(tl.int64)

    row_begin, row_end = visible_range(position, seq_len, window, chunk, mask_columns, CAUSAL)
    begin, full_end = visible_range(first_position, seq_len, window, chunk, mask_columns, CAUSAL)
    full_begin, end = visible_range(first_position + count - 1, seq_len, window, chunk, mask_columns, CAUSAL)
    begin, end = split_span(begin, end, split, num_splits, BLOCK_N)
    # One token's range has no left edge that cuts a tile: its tiles start there. An explicit mask may hide any key.
    LEFT_EDGE: tl.constexpr = TOKENS > 1 and mask is None and (window is not None or chunk is not None)
    main_begin, main_end = begin, begin
    if mask is None:
        main_begin, main_end = main_span(begin, end, full_begin, full_end, BLOCK_N)

    # LOG2E moves logits to base 2; it is multiplied in here, and not once per logit.
    scale = tl.cast(scale, tl.float32)
    if softcap is None:
        scale *= LOG2E
    else:
        scale /= tl.cast(softcap, tl.float32)
        softcap = tl.cast(softcap, tl.float32) * LOG2E
    # From here on these two are per row. (They keep their names because only an argument that is None may enter a
    # tuple as None.)
    if alibi_slopes is not None:
        alibi_slopes = tl.load(alibi_slopes + q_head.to(tl.int64) * alibi_stride).to(tl.float32) * LOG2E
    if mask is not None:
        mask += token * mask_stride_token
    keys = (k_cache + kv_head.to(tl.int64) * k_stride_head, k_stride_page, k_stride_token, k_stride_dim)
    values = (v_cache + kv_head.to(tl.int64) * v_stride_head, v_stride_page, v_stride_token, v_stride_dim)
    if V_LIKE_K:  # the same strides under the same name: row offsets are computed, and held in registers, once
        values = (v_cache + kv_head.to(tl.int64) * v_stride_head, k_stride_page, k_stride_token, k_stride_dim)
    # A scale that is one for all tokens leaves the sums: K's multiplies every logit, V's every output.
    v_head_scale = 1.0
    if k_scale is not None:
        k_scale += kv_head.to(tl.int64) * k_scale_stride_head
        if K_TOKEN_SCALE:
            keys += (k_scale, k_scale_stride_page, k_scale_stride_token)
        else:
            scale *= tl.load(k_scale).to(tl.float32)
    if v_scale is not None:
        v_scale += kv_head.to(tl.int64) * v_scale_stride_head
        if V_TOKEN_SCALE:
            values += (v_scale, v_scale_stride_page, v_scale_stride_token)
        else:
            v_head_scale = tl.load(v_scale).to(tl.float32)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        # A sink is a key with a logit and no value: it opens the softmax, in the first split only.
        sink = tl.load(sinks + q_head.to(tl.int64) * sinks_stride).to(tl.float32) * LOG2E
        maximum = tl.where(split == 0, sink, maximum)
        denominator = tl.where(split == 0, 1.0, denominator)

    query_rows = query + token * query_stride_token + q_head.to(tl.int64) * query_stride_head
    query_tile = (load_query(query_rows, query_stride_dim, valid, 0, DIM_QK, BLOCK_MAIN, FP32),)
    if BLOCK_REST > 0:
        query_tile += (load_query(query_rows, query_stride_dim, valid, BLOCK_MAIN, DIM_QK, BLOCK_REST, FP32),)
    if FP16:
        query_tile, row_scale = to_fp16(query_tile)
        scale = scale * row_scale[:, None]
    carry = (tl.zeros([BLOCK_M, BLOCK_V], tl.float32), denominator, maximum)
    if V_PAIRS:
        half = tl.zeros([BLOCK_M, BLOCK_V // 2], tl.float32)
        carry = (half, denominator, maximum, half)
    result, maximum, denominator = finish(
        attend(
            carry,
            query_tile,
            (row_begin, row_end, position, alibi_slopes, mask),
            keys,
            values,
            (block_table + seq.to(tl.int64) * table_stride_seq, table_stride_page),
            (begin, end, main_begin, main_end),
            scale, softcap, mask_stride_key,
            BLOCK_N, PAGE_SIZE, DIM_QK, DIM_V, BLOCK_V, K_FORMAT, V_FORMAT, V_IS_K, LEFT_EDGE,
        )
    )  # fmt: skip

    dim = tl.arange(0, BLOCK_V)
    result *= v_head_scale
    if scratch is not None:
        cut, number = valid, split.to(tl.int64) * num_tokens + token
        if PARTS:
            cut, number = valid & (num_splits > 1), token * 0 + part
            if (split == 0) & (kv_head == 0) & (head_block == 0):
                whole_sector = tl.zeros([PLACE], tl.int64) + pack(part, num_splits)
                tl.store(scratch + seq.to(tl.int64) * PLACE + tl.arange(0, PLACE), whole_sector)
            scratch += num_seqs * PLACE
            valid = valid & (num_splits == 1)
        softmax, values = in_record(scratch, number, q_head, NUM_KV_HEADS * GROUP, DIM_V, RECORD)
        tl.store(values[:, None] + dim[None, :], result, mask=cut[:, None] & (dim < DIM_V)[None, :])
        tl.store(softmax, pack(maximum, denominator), mask=cut)
    if PARTS or scratch is None:
        target = token * (NUM_KV_HEADS * GROUP) + q_head
        tl.store(
            out + target[:, None] * DIM_V + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None] & (dim < DIM_V)[None, :],
        )
        if lse is not None:
            tl.store(lse + target, lse_of(maximum, denominator), mask=valid)
