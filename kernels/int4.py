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
    """How a program of that kernel shares its work.

    Attributes:
        warps_k: warps along the depth; each multiplies :data:`STEP` weights of a column in a step.
        warps_n: warps along the columns.
        blocks: blocks of 32 columns of a warp.
        ahead: steps whose words are in registers or on their way there.
        staged: whether all that the program needs of ``x`` is copied to shared memory first.
        overlapped: whether its launch begins while the kernel before it runs, where the GPU can.
        early: whether a step that loads later words does so before it multiplies.
    """

    warps_k: int = 4
    warps_n: int = 1
    blocks: int = 1
    ahead: int = 1
    staged: bool = False
    overlapped: bool = False
    early: bool = False

    @property
    def block_n(self) -> int:
        """Columns of a program."""
        return 32 * self.warps_n * self.blocks

    def steps(self, depth: int) -> int:
        """Steps for ``depth`` weights of a column; warps may be left without any in the last."""
        return max(1, -(-depth // (STEP * self.warps_k)))

    def shared_bytes(self, rows: int, depth: int) -> int:
        """Shared memory of a program: its part of ``x``, in whose place the warps' sums are added afterwards."""
        block_m = rows_at_once(rows)
        staged = 2 * block_m * STEP * self.warps_k * self.steps(depth) if self.staged else 0
        return max(staged, 4 * block_m * self.block_n * self.warps_k)


FEW_ROWS_SHARED = 32 * 1024
"""Bytes of shared memory that each tile of :func:`few_rows_tile` needs, whatever the depth."""


def rows_at_once(rows: int) -> int:
    """Rows of ``x`` in a program: those of one product of a tensor core, or of two."""
    return 8 if rows <= 8 else 16


def few_rows_tile(rows: int, depth: int, width: int, units: int | None, shared: int) -> FewRowsTile:
    """The tile for a matmul of few rows on a GPU.

    A program has 16 warps, with words on their way that fill the registers, so an SM holds one. It gets as few columns
    as leave no SM a second one; where the widest leave some, there are many.

    On an H200, for 4096 x 4096, 4096 x 14336 and 14336 x 4096 weights, up to 8 rows and 16, each was the fastest of
    those timed that share no column between programs, or within 4% of it. Wide programs were not faster for overlapped
    launches. Those of 64 columns, and more rows than 16, were not timed.

    Args:
        rows: of ``x``. depth: weights of a column. width: columns.
        units: SMs; None: unknown.
        shared: bytes of shared memory that a program can have.
    """
    few, most = rows <= 8, units or 0
    blocks = max(1, -(-rows // rows_at_once(rows)))
    if blocks * -(-width // 32) <= most:
        tile = FewRowsTile(warps_k=16, ahead=2, staged=True, overlapped=True)
    elif blocks * -(-width // 64) <= most:
        tile = FewRowsTile(warps_k=8, warps_n=2, ahead=2, staged=True)
    elif few:
        return FewRowsTile(warps_k=8, warps_n=2, blocks=2)
    else:
        tile = FewRowsTile(warps_k=4, warps_n=4, ahead=2, staged=True)
    if tile.shared_bytes(rows, depth) <= shared:
        return tile
    # Registers then hold rows of ``x``, too, and words of one step.
    return dataclasses.replace(tile, staged=False, ahead=1)


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
