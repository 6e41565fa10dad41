"""Layer operators that end in a quantise as Triton kernels; meanings in :mod:`tcport.kernels.quantise`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport.kernels.call import Launcher
from tcport.kernels.quantise import LIMITS
from tcport.kernels.triton_arguments import as_bytes, read_format
from tcport.kernels.triton_fp8 import encode
from tcport.kernels.triton_layers import gated, normed_sum, power_of_two
from tcport.kernels.triton_write import nearest_int8


def silu_mul_quantise(
    gate: Tensor, up: Tensor, scale: Tensor | None, dtype: torch.dtype, *how: Any, launch: Launcher
) -> tuple[Tensor, Tensor]:
    """One program per row."""
    width = int(gate.shape[-1])
    quantised, scales = _results(gate, scale, dtype)
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    launch(silu_mul_quantise_kernel)[(torch.sym_max(gate.shape[0], 1),)](
        gate=gate,
        up=up,
        rows=gate.shape[0],
        gate_stride_row=gate.stride(0),
        gate_stride_dim=gate.stride(1),
        up_stride_row=up.stride(0),
        up_stride_dim=up.stride(1),
        **_quantising(quantised, scale, scales, *how),
        **_span(width),
    )
    return quantised, scales


def add_rms_norm_quantise(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None,
    dtype: torch.dtype,
    *how: Any,
    launch: Launcher,
) -> tuple[Tensor, Tensor, Tensor]:
    """One program per row."""
    width = int(x.shape[-1])
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    quantised, scales = _results(x, scale, dtype)
    x, residual = x.reshape(-1, width), residual.reshape(-1, width)
    launch(add_rms_norm_quantise_kernel)[(torch.sym_max(x.shape[0], 1),)](
        x=x,
        residual=residual,
        weight=weight,
        total=total,
        eps=eps,
        rows=x.shape[0],
        x_stride_row=x.stride(0),
        x_stride_dim=x.stride(1),
        residual_stride_row=residual.stride(0),
        residual_stride_dim=residual.stride(1),
        weight_stride=weight.stride(0),
        **_quantising(quantised, scale, scales, *how),
        **_span(width),
    )
    return total, quantised, scales


def _results(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = (*x.shape[:-1], 1) if scale is None else (0,)
    return (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(scales, dtype=torch.float32, device=x.device),
    )


def _quantising(
    quantised: Tensor,
    scale: Tensor | None,
    scales: Tensor,
    multiply: bool = False,
    amax_floor: float = 0.0,
    scale_floor: float = 0.0,
) -> dict[str, Any]:
    """The arguments that both kernels share."""
    return {
        "quantised": as_bytes(quantised),
        "scale": scales if scale is None else scale,
        "amax_floor": float(amax_floor),
        "scale_floor": float(scale_floor),
        "LIMIT": LIMITS[quantised.dtype],
        "FORMAT": read_format(quantised),
        "MULTIPLY": multiply,
        "BY_ROW": scale is None,
    }


def _span(width: int) -> dict[str, int]:
    block = power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(32, max(4, block // 512))}


@triton.jit(do_not_specialize=["rows"])
def silu_mul_quantise_kernel(
    gate,
    up,
    quantised,
    scale,
    rows,
    gate_stride_row,
    gate_stride_dim,
    up_stride_row,
    up_stride_dim,
    amax_floor,
    scale_floor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK).to(tl.int64)
    mask = dim < tl.where(row < rows, WIDTH, 0)
    gates, ups = gate + row * gate_stride_row + dim * gate_stride_dim, up + row * up_stride_row + dim * up_stride_dim
    values = gated(gates, ups, mask)
    _quantise_row(
        values.to(tl.float32), quantised, scale, row, rows, dim, mask, amax_floor, scale_floor, WIDTH, LIMIT, FORMAT,
        MULTIPLY, BY_ROW,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_quantise_kernel(
    x,
    residual,
    weight,
    total,
    quantised,
    scale,
    eps,
    rows,
    x_stride_row,
    x_stride_dim,
    residual_stride_row,
    residual_stride_dim,
    weight_stride,
    amax_floor,
    scale_floor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BY_ROW: tl.constexpr,
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
    _quantise_row(
        values.to(tl.float32), quantised, scale, row, rows, dim, mask, amax_floor, scale_floor, WIDTH, LIMIT, FORMAT,
        MULTIPLY, BY_ROW,
    )  # fmt: skip


@triton.jit
def _quantise_row(
    values, quantised, scale, row, rows, dim, mask, amax_floor, scale_floor, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    FORMAT: tl.constexpr, MULTIPLY: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    factor = _factor(values, scale, row, rows, amax_floor, scale_floor, LIMIT, MULTIPLY, BY_ROW)
    tl.store(quantised + row * WIDTH + dim, _encoded(values, factor, LIMIT, FORMAT, MULTIPLY), mask=mask)


@triton.jit
def _factor(
    values,
    scale,
    row,
    rows,
    amax_floor,
    scale_floor,
    LIMIT: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """What a row is divided by, or multiplied with; the scale of a row is stored. Columns past its end hold zeros."""
    if BY_ROW:
        amax = tl.maximum(tl.max(tl.abs(values)), amax_floor)
        factor = tl.maximum(tl.div_rn(amax, LIMIT), scale_floor)
        # The maximum of Triton passes over a NaN, that of PyTorch does not.
        factor = tl.where(tl.max((values != values).to(tl.int32)) > 0, float("nan"), factor)  # type: ignore
        tl.store(scale + row, factor, mask=row < rows)
        if MULTIPLY:
            factor = tl.div_rn(1.0, factor)
    else:
        factor = tl.load(scale)
    return factor


@triton.jit
def _encoded(values, factor, LIMIT: tl.constexpr, FORMAT: tl.constexpr, MULTIPLY: tl.constexpr):
    # Divided to nearest: an approximate quotient would land on the other side of a rounding boundary.
    scaled = values * factor if MULTIPLY else tl.div_rn(values, tl.zeros_like(values) + factor)
    if FORMAT is None:
        code = nearest_int8(scaled)
    elif FORMAT == "float8_e4m3fn in hardware":
        low = tl.maximum(scaled, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        code = tl.minimum(low, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode(scaled, FORMAT)
    return code
