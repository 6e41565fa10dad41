"""The operators between attention calls, in plain PyTorch: their specification, and the last link of their chains.

All arithmetic is done in ``compute_dtype`` (fp32, or fp64 for an oracle), and each result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor, *, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """``silu(gate) * up``, where ``silu(x) = x / (1 + exp(-x))``.

    Args:
        gate, up: ``[..., D]``, one shape and dtype, any strides.

    Returns:
        ``[..., D]`` in their dtype, contiguous.

    Source: GLU Variants Improve Transformer, arXiv:2002.05202, equation 6 (SwiGLU).
    """
    wide = gate.to(compute_dtype)
    return (wide / (1 + torch.exp(-wide)) * up.to(compute_dtype)).to(gate.dtype).contiguous()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, compute_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A residual stream's next value, and that value normalised by its root mean square.

    Args:
        x, residual: ``[..., D]``, one shape and dtype, any strides.
        weight: ``[D]`` in the same dtype.
        eps: added to the mean square.

    Returns:
        ``total = x + residual`` and ``total / sqrt(mean(total ** 2) + eps) * weight``, ``[..., D]`` in the dtype of
        ``x``, contiguous. The norm is that of ``total`` as it is rounded.

    Source: Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
    """
    total = (x.to(compute_dtype) + residual.to(compute_dtype)).to(x.dtype).contiguous()
    wide = total.to(compute_dtype)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (wide * scale * weight.to(compute_dtype)).to(x.dtype).contiguous()
