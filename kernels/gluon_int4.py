# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""A matmul of few rows and 4-bit weights in Gluon, for NVIDIA's tensor cores; meaning in :mod:`tcport.kernels.int4`.

A product of 128 weights a column is eight products of 16, one for each place in a word. Weights are the first operand,
so that eight rows of ``x`` fill a product. Copies and loads bring each thread, 16 bytes at a time, what its tensor core
wants of it: threads exchange nothing before their warps' sums are added at the end, and the words of several steps
are on their way at once. 16 bytes are four columns, which lie eight apart in a product: :func:`_product` puts them
there, and the kernel writes them back to where they were.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tcport.kernels.call import Launcher
from tcport.kernels.int4 import FewRowsTile
from tcport.kernels.triton_arguments import strides

# Triton 3.9 has it under another name.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


def few_rows_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, launch: Launcher, tile: FewRowsTile | None = None
) -> Tensor:
    """One program per block of rows and columns; groups are multiples of :data:`~tcport.kernels.int4.STEP`."""
    tile = tile or FewRowsTile()
    rows, depth, width = x.shape[0], 8 * int(packed.shape[0]), int(scales.shape[1])
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block_m = 8 if rows <= 8 else 16
    launch(few_rows_matmul_kernel)[(max(1, -(-rows // block_m)), triton.cdiv(width, tile.block_n))](
        x=x,
        packed=packed,
        scales=scales,
        zeros=zeros,
        out=out,
        rows=rows,
        **strides("x", x, ("row", "dim")),
        **strides("packed", packed, ("word", "column")),
        **strides("scales", scales, ("group", "column")),
        **strides("zeros", zeros, ("group", "column")),
        DEPTH=depth,
        WIDTH=width,
        GROUP=depth // int(scales.shape[0]),
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        WARPS=tile.warps,
        AHEAD=tile.ahead,
        UNROLLED=tile.ahead if tile.unrolled else 1,
        num_warps=tile.warps,
    )
    return out


@gluon.constexpr_function
def product_layout(warps):
    """Of products ``[warps, columns, rows]``."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def loads_layouts(block_m, block_n, warps):
    """Of ``x [warps, rows, 128]``, of words ``[warps, 16, columns]``, and of what groups share ``[warps, columns]``."""
    bits = range(warps.bit_length() - 1)
    more_rows = [[0, 8 << bit, 0] for bit in range((block_m // 8).bit_length() - 1)]
    more_columns = [32 << bit for bit in range((block_n // 32).bit_length() - 1)]
    x = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 64], *more_rows],
        lane_bases=[[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1 << bit, 0, 0] for bit in bits],
        block_bases=[],
        shape=[warps, block_m, 128],
    )
    words = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 8, 0], *([0, 0, column] for column in more_columns)],
        lane_bases=[[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        warp_bases=[[1 << bit, 0, 0] for bit in bits],
        block_bases=[],
        shape=[warps, 16, block_n],
    )
    shared = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *([0, column] for column in more_columns)],
        lane_bases=[[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[1 << bit, 0] for bit in bits],
        block_bases=[],
        shape=[warps, block_n],
    )
    return x, words, shared


@gluon.jit(do_not_specialize=["rows"])
def few_rows_matmul_kernel(
    x,
    packed,
    scales,
    zeros,
    out,
    rows,
    x_stride_row,
    x_stride_dim,
    packed_stride_word,
    packed_stride_column,
    scales_stride_group,
    scales_stride_column,
    zeros_stride_group,
    zeros_stride_column,
    DEPTH: gl.constexpr,
    WIDTH: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    UNROLLED: gl.constexpr,
):
    PRODUCT: gl.constexpr = product_layout(WARPS)
    X: gl.constexpr = loads_layouts(BLOCK_M, BLOCK_N, WARPS)[0]
    WORDS: gl.constexpr = loads_layouts(BLOCK_M, BLOCK_N, WARPS)[1]
    SHARED: gl.constexpr = loads_layouts(BLOCK_M, BLOCK_N, WARPS)[2]
    # Chunks of 16 bytes of a row change places with its number, so that eight threads meet in eight of them.
    RING: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    STEP: gl.constexpr = 128 * WARPS
    ROUND: gl.constexpr = STEP * AHEAD

    row = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, X)))
    row = row[None, :][:, :, None]
    x_k = (gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X))) * 128)[:, None][:, :, None]
    x_k += gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, :][:, None, :]
    x_at = x + row.to(gl.int64) * x_stride_row + x_k.to(gl.int64) * x_stride_dim
    x_mask = row < rows

    first_column = gl.program_id(1) * BLOCK_N
    column = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, :][:, None, :]
    word = (gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))) * 16)[:, None][:, :, None]
    word += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :][:, :, None]
    word_at = packed + word.to(gl.int64) * packed_stride_word + column.to(gl.int64) * packed_stride_column
    in_columns = column < WIDTH

    k = (gl.arange(0, WARPS, gl.SliceLayout(1, SHARED)) * 128)[:, None]
    shared_column = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SHARED))[None, :]

    ring = gl.allocate_shared_memory(gl.int32, [AHEAD, WARPS, 16, BLOCK_N], RING)
    for step in gl.static_range(AHEAD):
        _copy(ring.index(step), word_at, mask=in_columns & (step * STEP + word * 8 < DEPTH))
        async_copy.commit_group()
        word_at += STEP // 8 * packed_stride_word
    total = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, PRODUCT)
    next_a = gl.load(x_at, mask=x_mask & (x_k < DEPTH), other=0.0)
    next_scale = _of_groups(scales, k, shared_column, scales_stride_group, scales_stride_column, DEPTH, WIDTH, GROUP)
    next_zero = _of_groups(zeros, k, shared_column, zeros_stride_group, zeros_stride_column, DEPTH, WIDTH, GROUP)
    slot = 0
    for first in range(0, DEPTH, STEP * UNROLLED):
        for step in gl.static_range(UNROLLED):
            a, scale, zero = next_a, next_scale, next_zero
            async_copy.wait_group(AHEAD - 1)
            place = step if UNROLLED > 1 else slot
            words = ring.index(place).load(WORDS)
            x_at += STEP * x_stride_dim
            k += STEP
            after = first + (step + 1) * STEP
            next_a = gl.load(x_at, mask=x_mask & (after + x_k < DEPTH), other=0.0)
            next_scale = _of_groups(
                scales, k, shared_column, scales_stride_group, scales_stride_column, DEPTH, WIDTH, GROUP
            )
            next_zero = _of_groups(
                zeros, k, shared_column, zeros_stride_group, zeros_stride_column, DEPTH, WIDTH, GROUP
            )
            if ROUND < DEPTH:
                later = after + ROUND - STEP
                _copy(ring.index(place), word_at, mask=in_columns & (later + word * 8 < DEPTH))
                word_at += STEP // 8 * packed_stride_word
            async_copy.commit_group()
            slot = (slot + 1) % AHEAD
            total = _add_product(total, a, words, scale, zero, PRODUCT, BLOCK_M, BLOCK_N, WARPS)

    OUT: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    result = gl.sum(total, 0)
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
    out_column = (first_column + place // 32 * 32 + place % 8 * 4 + place % 32 // 8)[:, None]
    out_row = (gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT)))[None, :]
    at = out + out_row.to(gl.int64) * WIDTH + out_column
    gl.store(at, result.to(out.dtype.element_ty), mask=(out_row < rows) & (out_column < WIDTH))


@gluon.jit
def _of_groups(
    table, k, column, stride_group, stride_column, DEPTH: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr
):
    """The scales or zero points of the groups in which weights ``k`` are; of none, the middle level."""
    if table is None:
        value = k * 0 + column * 0 + 8
    else:
        at = table + (k // GROUP).to(gl.int64) * stride_group + column.to(gl.int64) * stride_column
        value = gl.load(at, mask=(k < DEPTH) & (column < WIDTH), other=0)
    return value


@gluon.jit
def _as_in_product(shared, PRODUCT: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """What groups share, in the order and layout of the columns of a product: ``[warps, columns, 1]`` in fp32."""
    moved = shared.to(gl.float32).reshape([WARPS, BLOCK_N // 32, 8, 4]).permute([0, 1, 3, 2])
    moved = gl.convert_layout(moved.reshape([WARPS, BLOCK_N]), gl.SliceLayout(2, PRODUCT), assert_trivial=True)
    return moved[:, :, None]


@gluon.jit
def _add_product(
    total, a, words, scale, zero, PRODUCT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Add a step's product; what a level is moved by, and its zero point, meet the sum of a row of ``x`` once."""
    part, sums = _product(a, words, PRODUCT, BLOCK_M, BLOCK_N, WARPS)
    base: gl.constexpr = 128.0 if a.dtype == gl.bfloat16 else 1024.0
    moved = _as_in_product(zero, PRODUCT, BLOCK_N, WARPS) + base
    return total + (part - sums * moved) * _as_in_product(scale, PRODUCT, BLOCK_N, WARPS)


@gluon.jit
def _product(a, words, PRODUCT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr):
    """The product of a step, place by place in the words, and the sum of each row of ``a``.

    ``a[..., 8 * i + j]`` is what place ``j`` of word i meets. The sums are products with ones: tensor cores are idle.
    """
    even, odd = gl.split(a.reshape([WARPS, BLOCK_M, 64, 2]))
    a04, a26 = gl.split(even.reshape([WARPS, BLOCK_M, 32, 2]))
    a15, a37 = gl.split(odd.reshape([WARPS, BLOCK_M, 32, 2]))
    words = words.reshape([WARPS, 8, 2, BLOCK_N // 32, 8, 4]).permute([0, 3, 5, 4, 1, 2])
    first, second = gl.split(words.reshape([WARPS, BLOCK_N, 8, 2]))
    # The places 0 to 3 of both words, and the places 4 to 7.
    low = _together("prmt.b32 $0, $1, $2, 0x5410;", first, second)
    high = _together("prmt.b32 $0, $1, $2, 0x7632;", first, second)
    part = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, PRODUCT)
    sums = gl.zeros([WARPS, 16, BLOCK_M], gl.float32, PRODUCT)
    part, sums = _two_places(a04, low, high, 0, part, sums, PRODUCT, BLOCK_M, BLOCK_N, WARPS)
    part, sums = _two_places(a15, low, high, 1, part, sums, PRODUCT, BLOCK_M, BLOCK_N, WARPS)
    part, sums = _two_places(a26, low, high, 2, part, sums, PRODUCT, BLOCK_M, BLOCK_N, WARPS)
    part, sums = _two_places(a37, low, high, 3, part, sums, PRODUCT, BLOCK_M, BLOCK_N, WARPS)
    # All columns of the sums are alike: the 16 that there are serve for the others.
    for bit in gl.static_range(BLOCK_N.bit_length() - 5):
        sums = gl.join(sums, sums).permute([0, 3, 1, 2]).reshape([WARPS, 32 << bit, BLOCK_M])
    return part, gl.convert_layout(sums, PRODUCT, assert_trivial=True)


@gluon.jit
def _together(asm: gl.constexpr, a, b):
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _two_places(
    a, low, high, place: gl.constexpr, part, sums, PRODUCT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Add the products of ``place`` and of the one four places above it."""
    X: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    W: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    of_low, of_high = gl.split(a.reshape([WARPS, BLOCK_M, 16, 2]))
    of_low = gl.convert_layout(of_low.permute([0, 2, 1]), X, assert_trivial=True)
    of_high = gl.convert_layout(of_high.permute([0, 2, 1]), X, assert_trivial=True)
    ones = gl.full([WARPS, 16, 16], 1.0, a.dtype, W)
    part = gl.nvidia.ampere.mma_v2(_levels(low, place, a.dtype, W, BLOCK_N, WARPS), of_low, part)
    part = gl.nvidia.ampere.mma_v2(_levels(high, place, a.dtype, W, BLOCK_N, WARPS), of_high, part)
    sums = gl.nvidia.ampere.mma_v2(ones, of_low, sums)
    return part, gl.nvidia.ampere.mma_v2(ones, of_high, sums)


@gluon.jit
def _levels(
    pairs, place: gl.constexpr, element: gl.constexpr, W: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr
):
    """A place of pairs of words, as 128 (bf16) or 1024 (fp16) plus the level: no conversion is needed."""
    AND_OR: gl.constexpr = (
        "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;"
        if element == gl.bfloat16
        else "lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xea;"
    )
    two = gl.inline_asm_elementwise(AND_OR, "=r,r", [pairs >> (4 * place)], dtype=gl.int32, is_pure=True, pack=1)
    both = gl.join(two.to(gl.int16), (two >> 16).to(gl.int16)).reshape([WARPS, BLOCK_N, 16])
    return gl.convert_layout(both.to(element, bitcast=True), W, assert_trivial=True)
