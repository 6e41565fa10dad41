# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""A matmul with weights of 4 bits as a Triton kernel; meaning in :mod:`tcport.kernels.int4`.

Weights go from packed words to the tensor cores in registers: a product of 128 weights a column is eight products of
16, one for each place in a word, with the matching eighth of ``x``. So a word is unpacked where the tensor core wants
its weights, and nothing is exchanged between threads. Each warp has rows of the weights to itself; their sums are added
at the end.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport.kernels.call import Launcher
from tcport.kernels.triton_arguments import int4_arguments

BLOCK_K = 128
"""Weights of a column that a warp multiplies in a step: 16 words, the depth of a tensor core's product."""


@dataclasses.dataclass(frozen=True)
class Int4Tile:
    """Rows and columns of a program; warps, each with weights of its own; copies of them on their way."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_for(width: int, itemsize: int, shared: int | None = None) -> Int4Tile:
    """The tile for a number of columns, bytes of a number of ``x``, and bytes of shared memory that a program can have.

    On an H200 these were the fastest of 14 tiles for 4096 and of 14 for 14336 columns, with 1 row and with 16, but for
    2% that one copy more on its way gave the second.
    """
    if itemsize > 2 or not shared or shared < 96 * 1024:
        return Int4Tile(16, 32, 2, 2)
    return Int4Tile(16, 64 if width >= 8192 and shared >= 160 * 1024 else 32, 4, 3)


def w4a16_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, launch: Launcher, tile: Int4Tile | None = None
) -> Tensor:
    """One program per block of rows and columns; tile None: one that fits every GPU."""
    rows, width = x.shape[0], int(scales.shape[1])
    tile = tile or tile_for(width, x.element_size())
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    grid = (torch.sym_max((rows + tile.block_m - 1) // tile.block_m, 1), triton.cdiv(width, tile.block_n))
    launch(w4a16_matmul_kernel)[grid](
        **int4_arguments(x, packed, scales, zeros),
        out=out,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK_K,
        SLICES=tile.warps,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def w4a16_matmul_kernel(
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
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    WORDS: tl.constexpr = BLOCK_K // 8
    # Where a step's weights share a scale it is applied to their sum, else to each of them.
    GROUPS: tl.constexpr = 1 if GROUP % BLOCK_K == 0 else WORDS
    EVEN: tl.constexpr = DEPTH % (BLOCK_K * SLICES) == 0
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, None, :]
    in_k = (tl.arange(0, SLICES) * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    in_words = (tl.arange(0, SLICES) * BLOCK_K)[:, None] + (tl.arange(0, WORDS) * 8)[None, :]
    in_groups = (tl.arange(0, SLICES) * BLOCK_K)[:, None] + (tl.arange(0, GROUPS) * (BLOCK_K // GROUPS))[None, :]
    x_at = x + row[None, :, None] * x_stride_row + in_k[:, None, :].to(tl.int64) * x_stride_dim
    word_at = packed + (in_words // 8)[:, :, None].to(tl.int64) * packed_stride_word + column * packed_stride_column
    in_rows, in_columns = (row < rows)[None, :, None], column < WIDTH

    total = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
    scale = _of_groups(scales, in_groups, column, scales_stride_group, scales_stride_column, DEPTH, WIDTH, GROUP)
    for first in range(0, DEPTH, BLOCK_K * SLICES):
        if EVEN:
            a = tl.load(x_at, mask=in_rows, other=0.0)
            words = tl.load(word_at, mask=in_columns, other=0)
        else:
            a = tl.load(x_at, mask=in_rows & (first + in_k < DEPTH)[:, None, :], other=0.0)
            words = tl.load(word_at, mask=in_columns & (first + in_words < DEPTH)[:, :, None], other=0)
        x_at += BLOCK_K * SLICES * x_stride_dim
        word_at += WORDS * SLICES * packed_stride_word
        zero = _of_groups(
            zeros, first + in_groups, column, zeros_stride_group, zeros_stride_column, DEPTH, WIDTH, GROUP
        )
        # The next step's, on their way while this one is computed: Triton makes no copies ahead of values of 16 bits.
        after = first + BLOCK_K * SLICES + in_groups
        next_scale = _of_groups(scales, after, column, scales_stride_group, scales_stride_column, DEPTH, WIDTH, GROUP)
        part = _product(a, words, scale, zero, SLICES, BLOCK_M, WORDS, GROUPS)
        if GROUPS == 1:
            part *= scale.to(tl.float32)
        total += part
        scale = next_scale
    target = out + row[:, None] * WIDTH + tl.reshape(column, (1, BLOCK_N))
    mask = (row < rows)[:, None] & tl.reshape(in_columns, (1, BLOCK_N))
    tl.store(target, tl.sum(total, 0).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _of_groups(
    table, k, column, stride_group, stride_column, DEPTH: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr
):
    """The scales or zero points of the groups in which weights ``k`` are; of none, the middle level."""
    if table is None:
        value = 8
    else:
        mask = (k < DEPTH)[:, :, None] & (column < WIDTH)
        at = (k // GROUP)[:, :, None].to(tl.int64) * stride_group + column * stride_column
        value = tl.load(table + at, mask=mask, other=0)
    return value


@triton.jit
def _product(
    a, words, scale, zero, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr
):
    """The product of a step, place by place in the words: ``a[..., 8 * i + j]`` is what place ``j`` of word i meets."""
    even, odd = tl.split(tl.reshape(a, (SLICES, BLOCK_M, WORDS * 4, 2)))
    a04, a26 = tl.split(tl.reshape(even, (SLICES, BLOCK_M, WORDS * 2, 2)))
    a15, a37 = tl.split(tl.reshape(odd, (SLICES, BLOCK_M, WORDS * 2, 2)))
    part = _two_places(a04, words, 0, scale, zero, None, SLICES, BLOCK_M, WORDS, GROUPS)
    part = _two_places(a15, words, 1, scale, zero, part, SLICES, BLOCK_M, WORDS, GROUPS)
    part = _two_places(a26, words, 2, scale, zero, part, SLICES, BLOCK_M, WORDS, GROUPS)
    return _two_places(a37, words, 3, scale, zero, part, SLICES, BLOCK_M, WORDS, GROUPS)


@triton.jit
def _two_places(
    a,
    words,
    place: tl.constexpr,
    scale,
    zero,
    part,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Add the product of ``place`` and of the one four places, or 16 bits, above it."""
    low, high = tl.split(tl.reshape(a, (SLICES, BLOCK_M, WORDS, 2)))
    element: tl.constexpr = a.dtype
    if element == tl.float32:
        w_low = ((words >> (4 * place)) & 15).to(tl.float32) - zero
        w_high = ((words >> (4 * place + 16)) & 15).to(tl.float32) - zero
    else:
        # A level in the low bits of 128 (bf16) or 1024 (fp16) is that number plus the level: no conversion is needed,
        # and the difference to the zero point, moved likewise, is exact.
        ONE: tl.constexpr = 0x4300 if element == tl.bfloat16 else 0x6400
        BASE: tl.constexpr = 128.0 if element == tl.bfloat16 else 1024.0
        pair = ((words >> (4 * place)) & 0x000F000F) | (ONE * 0x10001)
        moved = (zero + BASE).to(element)
        w_low = pair.to(tl.int16).to(element, bitcast=True) - moved
        w_high = (pair >> 16).to(tl.int16).to(element, bitcast=True) - moved
    if GROUPS > 1:
        w_low, w_high = w_low * scale, w_high * scale
    part = tl.dot(low, w_low, part, input_precision="ieee")
    return tl.dot(high, w_high, part, input_precision="ieee")
