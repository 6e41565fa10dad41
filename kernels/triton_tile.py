# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""The inner loop that decode and prefill share: one block of query rows against a range of keys of one sequence.

A row is one (query token, query head) pair; all rows of a block read the same KV head, so every K and V tile that is
loaded serves the whole group (GQA packing). What a row may see is an interval of key positions, ``visible_range``:
causality, window, chunk, length and the width of an explicit mask only move its two ends.

Softmax is the online one of FlashAttention (arXiv:2205.14135, algorithm 1) in base 2, which is what GPUs compute.

Arguments travel in tuples:
    carry: ``(accumulator [M, V], denominator [M], maximum [M])``, fp32; where values are read in pairs of dims, the
        accumulator has the even ones, ``[M, V / 2]``, and the odd ones follow at the end.
    query: ``(main [M, D],)`` or ``(main [M, D], rest [M, D'])``: two powers of two where one would pad too much.
    rows: ``(first visible key [M], end [M], position [M], ALiBi slope [M] in base 2 or None, mask row pointers [M] or
        None)``.
    keys, values: ``(pointer at the KV head, page stride, token stride, dim stride)``; with a scale per token there
        follow ``(scale pointer at the KV head, page stride, token stride)``.
    table: ``(pointer at the sequence's row, stride)``.
    span: ``(begin, end, main_begin, main_end)``: keys to visit, and those among them that every row sees.

``q.k`` times ``scale`` is the base-2 logit; with ``softcap``, that is the factor of its hyperbolic tangent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcport.kernels.triton_fp8 import decode, decode_pairs

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_query(
    pointers, stride_dim, valid, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, FP32: tl.constexpr
):
    """Dims ``FIRST .. FIRST + BLOCK`` of query rows; 0 beyond the head dim and in rows that are not valid."""
    dim = FIRST + tl.arange(0, BLOCK)
    tile = tl.load(
        pointers[:, None] + dim[None, :].to(tl.int64) * stride_dim,
        mask=valid[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    return tile.to(tl.float32) if FP32 else tile


@triton.jit
def to_fp16(query):
    """Query tiles ``[M, D]`` in fp16, and the powers of two ``[M]`` that their rows are divided by to fit into it."""
    largest = tl.max(tl.abs(query[0].to(tl.float32)), 1)
    if len(query) > 1:
        largest = tl.maximum(largest, tl.max(tl.abs(query[1].to(tl.float32)), 1))
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power == 0.0, 1.0, power)
    tiles = ((query[0].to(tl.float32) / power[:, None]).to(tl.float16),)
    if len(query) > 1:
        tiles += ((query[1].to(tl.float32) / power[:, None]).to(tl.float16),)
    return tiles, power


@triton.jit
def attend(
    carry,
    query,
    rows,
    keys,
    values,
    table,
    span,
    scale,
    softcap,
    mask_stride,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_IS_K: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
):
    """Fold the keys of ``span`` into ``carry``: masked tiles at the edges, unmasked ones between them."""
    begin, end, main_begin, main_end = span
    if LEFT_EDGE:
        carry = _attend_tiles(
            carry, query, rows, keys, values, table, begin, main_begin, end, scale, softcap, mask_stride,
            BLOCK_N, PAGE_SIZE, DIM_QK, DIM_V, BLOCK_V, K_FORMAT, V_FORMAT, V_IS_K, True,
        )  # fmt: skip
    if rows[4] is None:
        carry = _attend_tiles(
            carry, query, rows, keys, values, table, main_begin, main_end, end, scale, softcap, mask_stride,
            BLOCK_N, PAGE_SIZE, DIM_QK, DIM_V, BLOCK_V, K_FORMAT, V_FORMAT, V_IS_K, False,
        )  # fmt: skip
    return _attend_tiles(
        carry, query, rows, keys, values, table, main_end, end, end, scale, softcap, mask_stride,
        BLOCK_N, PAGE_SIZE, DIM_QK, DIM_V, BLOCK_V, K_FORMAT, V_FORMAT, V_IS_K, True,
    )  # fmt: skip


@triton.jit
def finish(carry):
    """Normalised output ``[M, V]`` of a carry, base-2 maximum ``[M]`` and sum of weights ``[M]``.

    Where nothing was visible, they are 0, -inf and 0.
    """
    accumulator, denominator, maximum = carry[0], carry[1], carry[2]
    if len(carry) > 3:
        accumulator = tl.interleave(accumulator, carry[3])
    out = accumulator / tl.where(denominator > 0, denominator, 1.0)[:, None]
    return out, maximum, denominator


@triton.jit
def _attend_tiles(
    carry,
    query,
    rows,
    keys,
    values,
    table,
    begin,
    end,
    keys_end,
    scale,
    softcap,
    mask_stride,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_IS_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    query_main = query[0]
    row_begin, row_end, position, slope, mask_rows = rows
    accumulator, denominator, maximum = carry[0], carry[1], carry[2]
    PAIRED: tl.constexpr = len(carry) > 3
    if PAIRED:
        odd = carry[3]
    BLOCK_MAIN: tl.constexpr = query_main.shape[1]

    # The page ids of a tile are loaded one tile ahead, so that the loads of K and V do not wait for them and the
    # software pipeliner sees plain loads. A table entry that holds no key before keys_end is never read.
    key = begin + tl.arange(0, BLOCK_N)
    page = _load_pages(table, key, keys_end, PAGE_SIZE)
    # Edges are a tile or two: buffers and a prologue for a pipeline would cost them more than it gives.
    for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED and mask_rows is None else None):
        key = start + tl.arange(0, BLOCK_N)
        slot = key.to(tl.uint32) % PAGE_SIZE  # unsigned: a shift and a mask, without a correction for the sign
        inside = (key < keys_end) if MASKED else None

        key_tile = _load_tile(keys, page, slot, inside, 0, DIM_QK, BLOCK_MAIN, K_FORMAT, query_main.dtype)
        logits = tl.dot(query_main, tl.trans(key_tile), input_precision="ieee")
        if len(query) > 1:
            rest_tile = _load_tile(
                keys, page, slot, inside, BLOCK_MAIN, DIM_QK, query[1].shape[1], K_FORMAT, query_main.dtype
            )
            logits = tl.dot(query[1], tl.trans(rest_tile), logits, input_precision="ieee")
        if V_IS_K:
            value_tile = key_tile
        elif PAIRED:
            value_tile, odd_tile = _load_pairs(values, page, slot, inside, DIM_V, BLOCK_V, V_FORMAT, query_main.dtype)
        else:
            value_tile = _load_tile(values, page, slot, inside, 0, DIM_V, BLOCK_V, V_FORMAT, query_main.dtype)

        logits *= scale
        if len(keys) > 4:
            logits *= _load_scales(keys, page, slot, inside)[None, :]
        if softcap is not None:
            logits = softcap * _tanh(logits)
        if slope is not None:
            logits += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            if mask_rows is not None:
                allowed = tl.load(mask_rows[:, None] + key[None, :].to(tl.int64) * mask_stride, mask=visible, other=0)
                visible &= allowed != 0
            logits = tl.where(visible, logits, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        reference = new_maximum
        if MASKED:
            # A row that has seen no key yet: keep -inf - -inf from becoming NaN.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        # The product with scale and this difference may be one instruction, which subtracts the rounded maximum from
        # what is not rounded. Of huge logits that leaves much, of either sign: the maximum is lowered by as much, and
        # what is above it has weight 1.
        lowered = reference - tl.abs(reference) * 2**-23
        weights = tl.exp2(tl.minimum(logits - lowered[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
        rescale = tl.exp2(maximum - reference)
        denominator = denominator * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        if len(values) > 4:
            weights *= _load_scales(values, page, slot, inside)[None, :]
        weights = weights.to(value_tile.dtype)
        accumulator = tl.dot(weights, value_tile, accumulator * rescale[:, None], input_precision="ieee")
        if PAIRED:
            odd = tl.dot(weights, odd_tile, odd * rescale[:, None], input_precision="ieee")
        page = _load_pages(table, key + BLOCK_N, keys_end, PAGE_SIZE)
    carry = (accumulator, denominator, maximum)
    if PAIRED:
        carry += (odd,)
    return carry


@triton.jit
def _load_pages(table, key, keys_end, PAGE_SIZE: tl.constexpr):
    """Page id of each key position; positions from ``keys_end`` on read nothing and get page 0."""
    pointer, stride = table
    column = (key.to(tl.uint32) // PAGE_SIZE).to(tl.int64)
    page = tl.load(pointer + column * stride, mask=key < keys_end, other=0)
    # No page id is negative. Where that is known, a product with a stride of 64 bits takes two instructions, not three.
    if page.dtype == tl.int32:
        page = page.to(tl.uint32, bitcast=True)
    return page.to(tl.int64)


@triton.jit
def _load_tile(
    cache,
    page,
    slot,
    inside,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    dtype: tl.constexpr,
):
    """Dims ``FIRST .. FIRST + BLOCK`` of the keys or values at ``(page, slot)``: ``[N, BLOCK]`` in ``dtype``.

    Lanes beyond the head dim and keys that are not ``inside`` are 0 and are not read: what lies there may be NaN,
    and 0 times NaN would reach the output.
    """
    dim = FIRST + tl.arange(0, BLOCK)
    # The part of a thread's dims stays the same from tile to tile; that of its rows serves K and V.
    row = page * cache[1] + slot.to(tl.int64) * cache[2]
    pointers = (cache[0] + dim.to(tl.int64) * cache[3])[None, :] + row[:, None]
    if inside is not None:
        if FIRST + BLOCK > DIM:
            tile = tl.load(pointers, mask=inside[:, None] & (dim < DIM)[None, :], other=0)
        else:
            tile = tl.load(pointers, mask=inside[:, None], other=0)
    elif FIRST + BLOCK > DIM:
        tile = tl.load(pointers, mask=(dim < DIM)[None, :], other=0)
    else:
        tile = tl.load(pointers)
    if FORMAT is not None:
        tile = decode(tile, FORMAT)
    elif tile.dtype == tl.int8 and dtype == tl.float16:
        tile = decode(tile.to(tl.uint8, bitcast=True), "int8")
    return tile.to(dtype)


@triton.jit
def _load_pairs(
    cache, page, slot, inside, DIM: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr
):
    """The even and the odd dims of the 8-bit values at ``(page, slot)``: two tiles ``[N, BLOCK / 2]`` in ``dtype``.

    As :func:`_load_tile`, but in words of two bytes. Values are multiplied by column: matrix units get words from
    shared memory in that order at once, and bytes one by one.
    """
    pair = tl.arange(0, BLOCK // 2)
    token = cache[0] + page * cache[1] + slot.to(tl.int64) * cache[2]
    pointers = token.to(tl.pointer_type(tl.uint16), bitcast=True)[:, None] + pair[None, :]
    if inside is not None:
        if BLOCK > DIM:
            words = tl.load(pointers, mask=inside[:, None] & (pair < DIM // 2)[None, :], other=0)
        else:
            words = tl.load(pointers, mask=inside[:, None], other=0)
    elif BLOCK > DIM:
        words = tl.load(pointers, mask=(pair < DIM // 2)[None, :], other=0)
    else:
        words = tl.load(pointers)
    if FORMAT is None and dtype == tl.float16:
        even, odd = decode_pairs(words, "int8")
    elif FORMAT is None:
        even, odd = words.to(tl.uint8).to(tl.int8, bitcast=True), words.to(tl.int16, bitcast=True) >> 8
    else:
        even, odd = decode_pairs(words, FORMAT)
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _load_scales(cache, page, slot, inside):
    """Scales ``[N]`` of the keys or values at ``(page, slot)``."""
    pointers = cache[4] + page * cache[5] + slot.to(tl.int64) * cache[6]
    scale = tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=0)
    return scale.to(tl.float32)


@triton.jit
def _tanh(x):
    """tanh to fp32 accuracy from exp2 alone, as no tanh is common to all of Triton's back ends."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    exponential = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    ratio = (1 - exponential) / (1 + exponential)
    # 1 - exponential cancels near 0; the series' first omitted term is below 1e-9 of x there.
    return tl.where(tl.abs(x) < 0.2, series, tl.where(x < 0, -ratio, ratio))
