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

    A thread has up to 128 registers, mostly for words on their way, so an SM holds 16 warps. They are one program's
    where the programs get an SM each, else those of two programs that need no loop, or of four with fewer warps: SMs
    that are done begin others sooner then. ``x`` is staged where shared memory holds a program's rows, but not for 16
    rows that need no loop: each step then waits for its own, not for all. With 16 rows staged and columns past the end,
    there is room for one step's words: with those of two, Triton 3.6 and 3.7 spill some.

    On an H200, for 4096 x 4096, 4096 x 14336 and 14336 x 4096 weights with 1, 8 and 16 rows, 32 of the second, and 8 of
    4096 x 11008 and 8192 x 14336, each was the fastest of those timed behind their like; the reasons given were not
    measured. Programs of 64 columns were not timed beside others.

    Args:
        rows: of ``x``. depth: weights of a column. width: columns.
        units: SMs; None: unknown.
        shared: bytes of shared memory that a program can have.
    """
    few = rows <= 8
    alone = (units or 0) // max(1, -(-rows // rows_at_once(rows)))  # blocks of columns whose programs get an SM each

    def fits(tile: FewRowsTile) -> bool:
        return tile.shared_bytes(rows, depth) <= shared

    def whole(tile: FewRowsTile) -> bool:
        # Masks, and loads of less than 16 bytes, take many registers.
        return width % tile.block_n == 0

    def staged(tile: FewRowsTile) -> FewRowsTile:
        return dataclasses.replace(tile, ahead=2 if few or whole(tile) else 1, staged=True)

    if -(-width // 32) <= alone:
        in_registers = FewRowsTile(warps_k=16, overlapped=True, early=few)
        if in_registers.steps(depth) <= 2:
            in_registers = dataclasses.replace(in_registers, ahead=2)
            if not few:
                return in_registers
        return staged(in_registers) if fits(staged(in_registers)) else in_registers
    if -(-width // 64) <= alone:
        in_registers = FewRowsTile(warps_k=8, warps_n=2)
        return staged(in_registers) if fits(staged(in_registers)) else in_registers
    at_once = FewRowsTile(warps_k=8, ahead=4, overlapped=True)
    loop = not few or not whole(at_once) or at_once.steps(depth) > at_once.ahead
    wide = FewRowsTile(warps_k=4, warps_n=4, staged=True, overlapped=few, early=True)
    blocks = -(-width // wide.block_n)
    if blocks <= alone and fits(wide) and (loop or 4 * blocks >= 3 * alone):
        return wide
    if few:
        return FewRowsTile(warps_k=8, warps_n=2, blocks=2) if loop else at_once
    return FewRowsTile(warps_k=4, overlapped=True, early=True)


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
