"""A matmul with weights of 4 bits as a Triton kernel; meaning in :mod:`tcport.kernels.int4`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport.kernels.call import Launcher
from tcport.kernels.triton_arguments import strides

BLOCKS_K = (64, 32)
"""Weights of one column that a step reads. They lie in one group, which is why a group is a multiple of one of them."""


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, launch: Launcher) -> Tensor:
    """One program per block of rows and columns, and for few rows per quarter of K: their sums are added afterwards."""
    rows, depth, width = x.shape[0], 8 * int(packed.shape[0]), int(scales.shape[1])
    group = depth // int(scales.shape[0])
    block_k = next(size for size in BLOCKS_K if group % size == 0)
    few = isinstance(rows, int) and rows <= 16
    block_m, block_n = (16, 64) if few else (64, 128)
    splits = 4 if few and depth >= 16 * block_k else 1
    out = torch.empty(
        (splits, rows, width) if splits > 1 else (rows, width),
        dtype=torch.float32 if splits > 1 else x.dtype,
        device=x.device,
    )
    launch(w4a16_matmul_kernel)[
        (torch.sym_max((rows + block_m - 1) // block_m, 1), triton.cdiv(width, block_n), splits)
    ](
        x=x,
        packed=packed,
        scales=scales,
        zeros=zeros,
        out=out,
        rows=rows,
        **strides("x", x, ("row", "dim")),
        **strides("packed", packed, ("word", "column")),
        **strides("scales", scales, ("group", "column")),
        **_zero_strides(zeros),
        DEPTH=depth,
        WIDTH=width,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STEPS=triton.cdiv(depth // block_k, splits),
        num_warps=4,
        num_stages=3,
    )
    return out.sum(0).to(x.dtype) if splits > 1 else out


def _zero_strides(zeros: Tensor | None) -> dict[str, Any]:
    if zeros is None:
        return {"zeros_stride_group": 0, "zeros_stride_column": 0}
    return strides("zeros", zeros, ("group", "column"))


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
    STEPS: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    in_k = tl.arange(0, BLOCK_K)
    in_word = tl.arange(0, BLOCK_K // 8)
    shift = 4 * tl.arange(0, 8)
    element: tl.constexpr = x.dtype.element_ty

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = split * STEPS
    for step in range(first, tl.minimum(first + STEPS, DEPTH // BLOCK_K)):
        k = step * BLOCK_K  # 64 bits, as the number of the split is
        group = k // GROUP
        word = k // 8 + in_word
        a = tl.load(
            x + row[:, None] * x_stride_row + (k + in_k)[None, :] * x_stride_dim,
            mask=row[:, None] < rows,
            other=0.0,
        )
        words = tl.load(
            packed + word[:, None] * packed_stride_word + column[None, :] * packed_stride_column,
            mask=column[None, :] < WIDTH,
            other=0,
        )
        scale = tl.load(
            scales + group * scales_stride_group + column * scales_stride_column, mask=column < WIDTH, other=0.0
        ).to(tl.float32)
        if zeros is None:
            zero = tl.full((BLOCK_N,), 8.0, tl.float32)
        else:
            zero = tl.load(
                zeros + group * zeros_stride_group + column * zeros_stride_column, mask=column < WIDTH, other=0
            ).to(tl.float32)
        levels = tl.reshape((words[:, None, :] >> shift[None, :, None]) & 15, (BLOCK_K, BLOCK_N))
        weight = ((levels.to(tl.float32) - zero[None, :]) * scale[None, :]).to(element)
        total = tl.dot(a, weight, total, input_precision="ieee")
    target = out + (split * rows + row)[:, None] * WIDTH + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < WIDTH))
