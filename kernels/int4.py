"""A matmul with weights of 4 bits in plain PyTorch: its specification, and the last link of its chain."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

PER_WORD = 8
"""Weights in an int32."""
MOST_ROWS = 32
"""Rows up to which a GPU waits for the weights' bytes, not for arithmetic; beyond, they are better dequantised once."""

STEP = 128
"""Weights of a column, of one group, that a warp of the kernel for tensor cores multiplies in a step."""


@dataclasses.dataclass(frozen=True)
class FewRowsTile:
    """Columns of a program; warps, each with weights of its own; steps whose words are on their way, and unrolled."""

    block_n: int = 32
    warps: int = 4
    ahead: int = 4
    unrolled: bool = False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: words of all steps on their way, where the sums are added afterwards."""
        return self.ahead * self.warps * self.block_n * STEP // 2


FEW_ROWS_SHARED = 64 * 1024
"""Bytes of shared memory that no tile of :func:`few_rows_tile` exceeds."""


def few_rows_tile(rows: int, width: int, units: int | None) -> FewRowsTile:
    """The tile for rows of ``x``, columns, and a GPU's number of SMs; None: unknown.

    While there is no program of 32 columns for each SM, one has to be enough for it: eight warps, with as much on their
    way as registers hold. Else programs hide each other's waits. Sixteen rows, which every program reads, are read half
    as often where 64 columns leave a program for each SM.

    On an H200 each was the fastest of those timed in its place, 11 for 1 row and for 16, and 5 for 4, 8 and 32; the
    unrolled tile was timed with 1 row, 64 columns with 1 and 16.
    """
    programs = max(1, -(-rows // 16)) * -(-width // 32)
    if units is None or programs > units:
        return FewRowsTile(block_n=64 if units is not None and rows > 8 and programs >= 2 * units else 32)
    return FewRowsTile(warps=8, unrolled=True) if rows <= 8 else FewRowsTile(warps=8, ahead=2)


def w4a16_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, *, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """``x @ w`` of weights ``w[k, n] = (q[k, n] - zeros[k // group, n]) * scales[k // group, n]``, as GPTQ stores them.

    Args:
        x: ``[T, K]``, fp32, fp16 or bf16.
        packed: int32 ``[K / 8, N]``: bits ``4 * j`` to ``4 * j + 3`` of ``packed[i, n]`` are ``q[8 * i + j, n]``.
        scales: ``[K / group, N]`` in the dtype of ``x``.
        zeros: integers from -128 to 128 of that shape; None: 8 everywhere.

    Returns:
        ``[T, N]`` in the dtype of ``x``, contiguous. Weights are rounded to that dtype, as they are where they are
        dequantised first; products are summed in ``compute_dtype`` and rounded once.

    Source: GPTQ, arXiv:2210.17323; the layout is that of its reference code's CUDA kernel.
    """
    weight = dequantised(packed, scales, zeros)
    return (x.to(compute_dtype) @ weight.to(compute_dtype)).to(x.dtype)


def dequantised(packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """The weights ``[K, N]`` in the dtype of their scales; arguments as of :func:`w4a16_matmul`."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=packed.device)
    words, (groups, width) = packed[:, None, :] >> shifts[None, :, None], scales.shape
    levels = (words & 15).reshape(groups, -1, width)
    centred = levels - (8 if zeros is None else zeros[:, None, :])
    return (centred * scales[:, None, :]).reshape(-1, width)
