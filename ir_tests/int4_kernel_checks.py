"""Checks of the Triton matmul with weights of 4 bits; ``test_int4_kernel.py`` runs each table in a process.

As in ``layer_kernel_checks``: numbers in Triton's interpreter, and compiles for GPUs that are not here.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from layer_kernel_checks import TARGETS
from subprocess_results import report

from tcport.kernels import int4

SHAPES = {
    "one row, groups of 128": (1, 256, 48, 128, torch.int32),
    "split sums, groups of 64": (5, 1024, 64, 64, torch.int8),
    "split sums of uneven length, groups of 32": (3, 544, 70, 32, torch.uint8),
    "many rows, groups of 128": (70, 256, 130, 128, torch.int32),
    "many rows, no zero points": (17, 128, 16, 64, None),
}
"""Rows, depth, width, group and the dtype of the zero points."""


def operands(shape: str, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Arguments with a transposed ``x`` and columns that lie apart in the packed words."""
    return operands_of(*SHAPES[shape], dtype=dtype, device=device)


def operands_of(
    rows: int, depth: int, width: int, group: int, zeros_dtype: torch.dtype | None, *, dtype: torch.dtype,
    device: str = "cpu",
) -> list[Any]:  # fmt: skip
    """The same from sizes, as :data:`SHAPES` has them."""
    rng = torch.Generator().manual_seed(depth)
    x = torch.randn(depth, rows, generator=rng).to(dtype).t()
    packed = torch.randint(-(2**31), 2**31, (depth // 8, 2 * width), generator=rng).to(torch.int32)[:, ::2]
    scales = (torch.rand(depth // group, width, generator=rng) * 0.1 + 0.01).to(dtype)
    zeros = torch.randint(0, 16, (depth // group, width), generator=rng)
    arguments = [x, packed, scales, None if zeros_dtype is None else zeros.to(zeros_dtype)]
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]


def agrees(shape: str, dtype: torch.dtype) -> None:
    """With :mod:`tcport.kernels.int4` in fp64, relative to the largest sum."""
    from tcport.kernels.triton_int4 import w4a16_matmul

    arguments = operands(shape, dtype)
    expected = int4.w4a16_matmul(*arguments, compute_dtype=torch.float64).double()
    out = w4a16_matmul(*arguments, launch=lambda kernel: kernel)
    assert (out.dtype, out.shape) == (dtype, expected.shape)
    assert out.is_contiguous()
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def interpreted() -> dict[str, Callable[[], None]]:
    return {
        f"{shape} {dtype}": functools.partial(agrees, shape, dtype)
        for shape in SHAPES
        for dtype in (torch.float32, torch.float16)
    }


SHARED = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes that a program can have, by the vendors' programming guides."""


def compile_for(target: str, dtype: torch.dtype, width: int, group: int) -> None:
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.triton_int4 import tile_for, w4a16_matmul

    x, packed = torch.empty(3, 4096, dtype=dtype), torch.empty(512, width, dtype=torch.int32)
    scales, zeros = (torch.empty(4096 // group, width, dtype=d) for d in (dtype, torch.int32))
    tile = tile_for(width, dtype.itemsize, SHARED[target])
    (launch,) = record(w4a16_matmul, *(a.to("meta") for a in (x, packed, scales, zeros)), tile=tile)
    made = compile_launch(launch, GPUTarget(*TARGETS[target]))
    assert made.metadata.shared <= SHARED[target]
    if "ptx" in made.asm and dtype != torch.float32:
        assert "mma" in made.asm["ptx"]


def compile_few_rows_for(target: str, dtype: torch.dtype, rows: int, depth: int, width: int, units: int) -> None:
    """The Gluon kernel, whose conversions of layouts the compiler itself checks to be none."""
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.gluon_int4 import few_rows_matmul
    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting

    x, packed, scales, zeros = operands_of(rows, depth, width, 128, torch.int8, dtype=dtype)
    tile = int4.few_rows_tile(rows, depth, width, units, SHARED[target])
    given = [a.to("meta") for a in (x.contiguous(), packed.contiguous(), scales, zeros)]
    with targeting(GPUTarget(*TARGETS[target])):
        (launch,) = record(few_rows_matmul, *given, tile=tile)
    made = compile_launch(launch, GPUTarget(*TARGETS[target]))
    assert made.metadata.shared <= tile.shared_bytes(rows, depth) <= SHARED[target]
    ptx = made.asm["ptx"]
    assert "mma.sync" in ptx
    # 16 bytes at a time: of a step's words four for each block, in front of the loop and in it.
    ahead = min(tile.ahead, tile.steps(depth))
    loads = re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx)
    assert len(loads) >= 4 * tile.blocks * (ahead + (ahead < tile.steps(depth)))
    assert ("cp.async.cg.shared.global [" in ptx) == tile.staged
    assert ("griddepcontrol.wait" in ptx) == (tile.overlapped and target == "sm_90")
    assert ("bar.warp.sync" in ptx) == (tile.early and ahead < tile.steps(depth))


def nothing_spills_for(depth: int, width: int, rows: int, zeros_dtype: torch.dtype) -> None:
    """Of 16 rows that are staged, with masks for columns past the end and words that are loaded one by one."""
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.gluon_int4 import few_rows_matmul
    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting
    from tcport.tiling.compile_worker import _nvidia_resources

    x, packed = torch.empty(rows, depth, dtype=torch.bfloat16), torch.empty(depth // 8, width, dtype=torch.int32)
    scales, zeros = (torch.empty(depth // 128, width, dtype=d) for d in (torch.bfloat16, zeros_dtype))
    tile = int4.few_rows_tile(rows, depth, width, 132, SHARED["sm_90"])
    assert tile.staged
    target = GPUTarget(*TARGETS["sm_90"])
    with targeting(target):
        (launch,) = record(few_rows_matmul, *(a.to("meta") for a in (x, packed, scales, zeros)), tile=tile)
    assert _nvidia_resources(compile_launch(launch, target))["spill"] == 0


def compiled() -> dict[str, Callable[[], None]]:
    few_rows = {
        f"few rows, {target} {dtype} {rows} of {depth} x {width}": functools.partial(
            compile_few_rows_for, target, dtype, rows, depth, width, units
        )
        for target, dtype, rows, depth, width, units in (
            ("sm_80", torch.float16, 1, 4096, 96, 108),
            ("sm_86", torch.bfloat16, 9, 1536, 96, 84),
            ("sm_86", torch.float16, 8, 1536, 2720, 84),
            ("sm_90", torch.bfloat16, 16, 512, 16960, 132),
            ("sm_90", torch.bfloat16, 1, 14336, 96, 132),
            ("sm_89", torch.float16, 8, 4096, 14336, 58),
            ("sm_89", torch.bfloat16, 16, 4096, 14336, 58),
            ("sm_90", torch.bfloat16, 8, 4096, 14336, 132),
            ("sm_90", torch.float16, 16, 4096, 14336, 132),
            ("sm_90", torch.bfloat16, 32, 4096, 14336, 132),
            ("sm_90", torch.bfloat16, 16, 4096, 4096, 132),
            ("sm_90", torch.bfloat16, 16, 14336, 4096, 132),
            ("sm_90", torch.bfloat16, 16, 4096, 6144, 132),
        )
    }
    masked = {
        f"few rows, nothing spills, {rows} of {depth} x {width}, zeros {dtype}": functools.partial(
            nothing_spills_for, depth, width, rows, dtype
        )
        for depth, width, rows in ((6144, 520, 32), (6144, 4098, 16), (5120, 4098, 32))
        for dtype in (torch.int8, torch.int32)
    }
    return (
        few_rows
        | masked
        | {
            f"{target} {dtype} {width} columns, groups of {group}": functools.partial(
                compile_for, target, dtype, width, group
            )
            for target, dtype in (
                ("sm_80", torch.float32),
                ("sm_86", torch.float16),
                ("sm_90", torch.bfloat16),
                ("gfx942", torch.bfloat16),
            )
            for width, group in ((4096, 128), (14336, 64))
        }
    )


TABLES = {"interpreted": interpreted, "compiled": compiled}

if __name__ == "__main__":
    report(TABLES[sys.argv[1]]())
