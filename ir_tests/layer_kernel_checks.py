"""Checks of the Triton kernels between attention calls; ``test_layer_kernels.py`` runs each table in a process.

``interpreted`` compares numbers in Triton's interpreter (fp32 and fp16: it computes bfloat16 wrongly); ``compiled``
compiles for GPUs that are not here. Triton allows no both in one process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from subprocess_results import report
from torch import Tensor

from tcport.kernels import layers

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
"""Relative and absolute: 16 ulps of fp32, 1 ulp of fp16."""
TARGETS = {
    "sm_75": ("cuda", 75, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}


def rows(dtype: torch.dtype, width: int, strided: bool, device: str = "cpu") -> list[Tensor]:
    """Two operands ``[2, 3, width]``: halves of one projection, or of their own."""
    rng = torch.Generator().manual_seed(width)
    if device == "meta":
        return [torch.empty(2, 3, width, dtype=dtype, device="meta") for _ in range(2)]
    both = torch.randn(2, 3, 2 * width, generator=rng, dtype=torch.float32).mul_(2).to(dtype)
    a, b = both.chunk(2, -1)
    return [a, b] if strided else [a.contiguous(), b.contiguous()]


def agree(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        torch.testing.assert_close(a.double(), b.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def silu_mul(dtype: torch.dtype, width: int, strided: bool) -> None:
    from tcport.kernels.triton_layers import silu_mul as kernel

    gate, up = rows(dtype, width, strided)
    expected = layers.silu_mul(gate.double(), up.double(), compute_dtype=torch.float64)
    agree([kernel(gate, up, lambda k: k)], [expected], dtype)


def add_rms_norm(dtype: torch.dtype, width: int, strided: bool) -> None:
    from tcport.kernels.triton_layers import add_rms_norm as kernel

    x, residual = rows(dtype, width, strided)
    weight = torch.linspace(0.5, 2, 2 * width, dtype=dtype)[::2]
    total = x + residual
    _, normed = layers.add_rms_norm(
        total.double(), torch.zeros_like(total).double(), weight.double(), 1e-5, compute_dtype=torch.float64
    )
    agree(kernel(x, residual, weight, 1e-5, lambda k: k), [total, normed], dtype)


def interpreted() -> dict[str, Callable[[], None]]:
    return {
        f"{check.__name__} {dtype} width {width}{' strided' if strided else ''}": functools.partial(
            check, dtype, width, strided
        )
        for check in (silu_mul, add_rms_norm)
        for dtype in TOLERANCE
        for width, strided in ((64, False), (5, True), (1500, True))
    }


def compile_for(target: str, name: str, dtype: torch.dtype) -> None:
    from triton.backends.compiler import GPUTarget

    from tcport.kernels import triton_layers
    from tcport.kernels.offline import compile_launch, record

    args: list[Any] = rows(dtype, 4096, False, "meta")
    if name == "add_rms_norm":
        args += [torch.empty(4096, dtype=dtype, device="meta"), 1e-5]
    (launch,) = record(getattr(triton_layers, name), *args)
    assert compile_launch(launch, GPUTarget(*TARGETS[target])).metadata.shared <= 4096  # what a reduction exchanges


def compiled() -> dict[str, Callable[[], None]]:
    return {
        f"{name} {target} {dtype}": functools.partial(compile_for, target, name, dtype)
        for name in ("silu_mul", "add_rms_norm")
        for target, dtype in (("sm_80", torch.float16), ("sm_90", torch.bfloat16), ("gfx942", torch.bfloat16))
    }


TABLES = {"interpreted": interpreted, "compiled": compiled}

if __name__ == "__main__":
    report(TABLES[sys.argv[1]]())
