"""Checks of the Triton kernels that end in a quantise; ``test_quantise_kernel.py`` runs each table in a process.

As in ``layer_kernel_checks``: numbers in Triton's interpreter, and compiles for GPUs that are not here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from layer_kernel_checks import TARGETS, rows
from subprocess_results import report
from torch import Tensor

from tcport.kernels import layers, quantise

FP8 = torch.float8_e4m3fn
HOWS: dict[str, tuple[Any, ...]] = {
    "fp8 divided": (torch.tensor(0.0625), FP8, False),
    "fp8 multiplied": (torch.tensor([13.0]), FP8, True),
    "int8 divided": (torch.tensor(0.03), torch.int8, False),
    "fp8 by row": (None, FP8, False, 0.0, 1e-3),
    "fp8 by row, reciprocal": (None, FP8, True, 1e-4, 0.0),
    "int8 by row": (None, torch.int8, False, 1e-5, 0.0),
    "int8 by row, reciprocal": (None, torch.int8, True, 0.0, 0.0),
}


def operands(name: str, dtype: torch.dtype, width: int, strided: bool, device: str = "cpu") -> list[Any]:
    """Arguments before those of the quantise: the first row holds a zero row, the last a NaN."""
    a, b = rows(dtype, width, strided, device)
    if device != "meta":
        a[0, 0], b[0, 0], a[1, 2, 0] = 0.0, 0.0, float("nan")
    weight = torch.ones(width, dtype=dtype, device=device)
    return [a, b] if name == "silu_mul_quantise" else [a, b, weight, 1e-5]


def one_step(actual: Tensor, expected: Tensor, share: float) -> None:
    """8-bit values are neighbours at most, and that in few places: what is rounded may differ in its last bit."""
    a, b = actual.double(), expected.double()
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(), b.nan_to_num()
    wrong = a != b
    assert wrong.double().mean() <= share, f"{wrong.double().mean():.3} differ"
    spacing = 1.0 if actual.dtype == torch.int8 else torch.clamp(b.abs() / 8, min=2.0**-9)
    assert bool(((a - b).abs() <= spacing).all())


def agrees(name: str, how: str, dtype: torch.dtype, width: int, strided: bool) -> None:
    """With :mod:`tcport.kernels.quantise` of the layer operator in fp64, rounded to the dtype."""
    from tcport.kernels import triton_quantise

    arguments = operands(name, dtype, width, strided)
    if HOWS[how][0] is None and HOWS[how][3:] == (0.0, 0.0):
        arguments[0][0, 0], arguments[1][0, 0] = 1.0, 2.0  # without a floor, a row of zeros has no values
    if HOWS[how][1] == torch.int8:
        arguments[0][1, 2, 0] = 1.0  # int8 has no NaN
    *total, codes, scales = getattr(triton_quantise, name)(*arguments, *HOWS[how], launch=lambda k: k)
    if name == "silu_mul_quantise":
        layer = layers.silu_mul(*(a.double() for a in arguments), compute_dtype=torch.float64)
    else:
        expected_total = arguments[0] + arguments[1]
        torch.testing.assert_close(total[0], expected_total, rtol=0, atol=0, equal_nan=True)
        _, layer = layers.add_rms_norm(
            expected_total.double(),
            torch.zeros_like(expected_total).double(),
            arguments[2].double(),
            arguments[3],
            compute_dtype=torch.float64,
        )
    expected, expected_scales = quantise.quantise(layer.to(dtype), *HOWS[how], compute_dtype=torch.float64)
    assert (codes.dtype, codes.shape) == (HOWS[how][1], layer.shape)
    assert codes.is_contiguous()
    torch.testing.assert_close(
        scales, expected_scales, rtol=2e-3 if dtype == torch.float16 else 2e-6, atol=0, equal_nan=True
    )
    one_step(codes, expected, share=0.02)


def interpreted() -> dict[str, Callable[[], None]]:
    return {
        f"{name} {how} {dtype} width {width}": functools.partial(agrees, name, how, dtype, width, width != 64)
        for name in ("silu_mul_quantise", "add_rms_norm_quantise")
        for how in HOWS
        for dtype, width in ((torch.float32, 5), (torch.float16, 64), (torch.float32, 700))
    }


def compile_for(target: str, name: str, how: str, dtype: torch.dtype) -> None:
    from triton.backends.compiler import GPUTarget

    from tcport.kernels import triton_quantise
    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting

    scale, *rest = HOWS[how]
    scale = scale if scale is None else torch.empty(1, device="meta")
    gpu = GPUTarget(*TARGETS[target])
    with targeting(gpu):
        (launch,) = record(getattr(triton_quantise, name), *operands(name, dtype, 4096, False, "meta"), scale, *rest)
    hardware = launch.arguments["FORMAT"] == "float8_e4m3fn in hardware"
    assert hardware == (target == "sm_90" and rest[0] == FP8)
    compiled = compile_launch(launch, gpu)
    assert compiled.metadata.shared <= 4096 * dtype.itemsize  # the sum: bytes are stored in another layout than it is
    if "ptx" in compiled.asm:
        assert ("e4m3x2" in compiled.asm["ptx"]) == hardware


def compiled() -> dict[str, Callable[[], None]]:
    return {
        f"{name} {how} {target} {dtype}": functools.partial(compile_for, target, name, how, dtype)
        for name in ("silu_mul_quantise", "add_rms_norm_quantise")
        for how in ("fp8 divided", "fp8 by row", "int8 by row, reciprocal")
        for target, dtype in (("sm_80", torch.float16), ("sm_90", torch.bfloat16), ("gfx942", torch.bfloat16))
    }


TABLES = {"interpreted": interpreted, "compiled": compiled}

if __name__ == "__main__":
    report(TABLES[sys.argv[1]]())
