"""The operators between attention calls as Triton kernels; meanings in :mod:`tcport.kernels.layers`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport.kernels.call import Launcher

MAX_WIDTH = 32768
"""Elements of a row that one program holds: 128 KiB in fp32 over 32 warps, 32 registers a thread."""


def silu_mul(gate: Tensor, up: Tensor, launch: Launcher) -> Tensor:
    """One program per row and 1024 columns of it."""
    width = int(gate.shape[-1])
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    block = min(1024, power_of_two(width))
    launch(silu_mul_kernel)[(torch.sym_max(gate.shape[0], 1), triton.cdiv(width, block))](
        gate=gate,
        up=up,
        out=out,
        rows=gate.shape[0],
        gate_stride_row=gate.stride(0),
        gate_stride_dim=gate.stride(1),
        up_stride_row=up.stride(0),
        up_stride_dim=up.stride(1),
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, launch: Launcher) -> tuple[Tensor, Tensor]:
    """One program per row."""
    width = int(x.shape[-1])
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    x, residual = x.reshape(-1, width), residual.reshape(-1, width)
    block = power_of_two(width)
    launch(add_rms_norm_kernel)[(torch.sym_max(x.shape[0], 1),)](
        x=x,
        residual=residual,
        weight=weight,
        total=total,
        normed=normed,
        eps=eps,
        rows=x.shape[0],
        x_stride_row=x.stride(0),
        x_stride_dim=x.stride(1),
        residual_stride_row=residual.stride(0),
        residual_stride_dim=residual.stride(1),
        weight_stride=weight.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=min(32, max(4, block // 512)),
    )
    return total, normed


def power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@triton.jit(do_not_specialize=["rows"])
def silu_mul_kernel(
    gate,
    up,
    out,
    rows,
    gate_stride_row,
    gate_stride_dim,
    up_stride_row,
    up_stride_dim,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dim = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = dim < tl.where(row < rows, WIDTH, 0)
    gates, ups = gate + row * gate_stride_row + dim * gate_stride_dim, up + row * up_stride_row + dim * up_stride_dim
    tl.store(out + row * WIDTH + dim, gated(gates, ups, mask), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    normed,
    eps,
    rows,
    x_stride_row,
    x_stride_dim,
    residual_stride_row,
    residual_stride_dim,
    weight_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK).to(tl.int64)
    mask = dim < tl.where(row < rows, WIDTH, 0)
    values = normed_sum(
        x + row * x_stride_row + dim * x_stride_dim,
        residual + row * residual_stride_row + dim * residual_stride_dim,
        weight + dim * weight_stride,
        total + row * WIDTH + dim,
        eps,
        mask,
        dim < WIDTH,
        WIDTH,
    )
    tl.store(normed + row * WIDTH + dim, values, mask=mask)


@triton.jit
def gated(gate, up, mask):
    """``silu(gate) * up`` of what two blocks of pointers lead to, rounded to the dtype of ``gate``."""
    g = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up, mask=mask, other=0.0).to(tl.float32)
    return (g / (1 + tl.exp(-g)) * u).to(gate.dtype.element_ty)


@triton.jit
def normed_sum(x, residual, weight, total, eps, mask, in_width, WIDTH: tl.constexpr):
    """The norm of a row's sum, rounded to the dtype of ``total``, where the sum itself is stored.

    ``x``, ``residual``, ``weight`` and ``total`` are blocks of pointers to a row's columns.
    """
    a = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    stored = (a + b).to(total.dtype.element_ty)
    tl.store(total, stored, mask=mask)
    wide = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / WIDTH + eps)
    w = tl.load(weight, mask=in_width, other=0.0).to(tl.float32)
    return (wide * scale * w).to(total.dtype.element_ty)
