"""Layer operators that end in a quantise, in plain PyTorch: their specification, and the last link of their chains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport.kernels import layers

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest value of each format (OCP 8-bit floating point specification, revision 1.0); int8 reaches to -128 too."""


def quantise(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    multiply: bool = False,
    amax_floor: float = 0.0,
    scale_floor: float = 0.0,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """A tensor in 8 bits: with one scale for all, or with a scale for each row that is computed from the row.

    Args:
        x: ``[..., D]``.
        scale: fp32, one element: the tensor is divided by it. None: rows have scales of their own,
            ``max(max(amax, amax_floor) / limit, scale_floor)`` of the largest magnitude ``amax`` in a row.
        dtype: float8_e4m3fn or int8.
        multiply: the tensor is multiplied by ``scale``, or by the reciprocal of a row's scale, and not divided by it.

    Returns:
        ``[..., D]`` in ``dtype``, rounded to nearest even, saturated, contiguous; and the scales of the rows,
        ``[..., 1]`` in fp32, or ``[0]`` where ``scale`` was given. A NaN stays one in fp8, and makes one of its scale.
    """
    wide, limit = x.to(compute_dtype), LIMITS[dtype]
    if scale is None:
        amax = wide.abs().amax(-1, keepdim=True).clamp(min=amax_floor)
        scales = (amax / limit).clamp(min=scale_floor).to(torch.float32)
        factor = scales.to(compute_dtype)
        factor = factor.reciprocal() if multiply else factor
    else:
        scales, factor = x.new_empty(0, dtype=torch.float32), scale.to(compute_dtype).reshape(())
    scaled = wide * factor if multiply else wide / factor
    if dtype == torch.int8:
        return scaled.round().clamp(-128, 127).to(dtype).contiguous(), scales
    return scaled.clamp(-limit, limit).to(dtype).contiguous(), scales


def silu_mul_quantise(
    gate: Tensor, up: Tensor, scale: Tensor | None, dtype: torch.dtype, *how: Any
) -> tuple[Tensor, Tensor]:
    """:func:`quantise` of :func:`tcport.kernels.layers.silu_mul`, of its result as that is rounded."""
    return quantise(layers.silu_mul(gate, up), scale, dtype, *how)


def add_rms_norm_quantise(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor | None, dtype: torch.dtype, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantise` of the norm of :func:`tcport.kernels.layers.add_rms_norm`, as that is rounded; first the sum."""
    total, normed = layers.add_rms_norm(x, residual, weight, eps)
    return total, *quantise(normed, scale, dtype, *how)
