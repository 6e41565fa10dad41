"""Capability probes: each runs a kernel on the device and compares its numbers with PyTorch's.

A probe returns what it measured in one line, and raises where the capability is absent or wrong. Products of small
whole numbers are exact in every format, so a matrix instruction that is there and right gives equality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from tcport.probes import kernels

_BLOCK = 32
# Triton's decorator hides that a kernel is launched with plain values and with compile options.
_product_kernel: Any = kernels.product
_pipelined_sum: Any = kernels.pipelined_sum
_count_up: Any = kernels.count_up
_meet: Any = kernels.meet


def _product(dtype: torch.dtype, accumulate: tl.dtype = tl.float32) -> Callable[[torch.device], str]:
    def run(device: torch.device) -> str:
        a, b = (torch.randint(-3, 4, (_BLOCK, _BLOCK), device=device) for _ in range(2))
        out = torch.empty(_BLOCK, _BLOCK, device=device, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
        _product_kernel[(1,)](a.to(dtype), b.to(dtype), out, _BLOCK, accumulate)
        _require_equal(out.double(), a.double() @ b.double().T)
        return "right"

    return run


def _async_copy(device: torch.device) -> str:
    x = torch.randint(-3, 4, (8, _BLOCK, _BLOCK), device=device).half()
    out = torch.empty(_BLOCK, _BLOCK, device=device)
    compiled = _pipelined_sum[(1,)](x, out, 8, _BLOCK, num_stages=3)
    _require_equal(out.double(), (x.double() @ x.double().mT).sum(0))
    assembly = compiled.asm.get("ptx") or compiled.asm.get("amdgcn") or ""
    copies = [name for name in ("cp.async", "buffer_load_dword", "global_load_lds") if name in assembly]
    if "cp.async" not in copies and "lds" not in " ".join(copies):
        raise ValueError("the compiler made no asynchronous copy")
    return f"right, by {copies[0]}"


def _atomics(device: torch.device) -> str:
    """fp16 sums are exact up to 2048; rates compare fp16 with fp32."""
    rates = []
    for dtype in (torch.float16, torch.float32):
        counter = torch.zeros(1024, device=device, dtype=dtype)
        _count_up[(512,)](counter, 1024)
        _require_equal(counter.double(), torch.full((1024,), 512.0, device=device).double())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _count_up[(4096,)](counter, 1024)
        end.record()
        end.synchronize()
        rates.append(4096 * 1024 / (start.elapsed_time(end) * 1e-3))
    return f"right, {rates[0]:.2e}/s in fp16, {rates[1]:.2e}/s in fp32"


def _cooperative(device: torch.device) -> str:
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    arrived = torch.zeros(1, device=device, dtype=torch.int32)
    seen = torch.zeros(programs, device=device, dtype=torch.int32)
    _meet[(programs,)](arrived, seen, programs, launch_cooperative_grid=True)
    _require_equal(seen.double(), torch.full((programs,), programs, device=device).double())
    return f"{programs} programs met"


def _require_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    worst = (got - want).abs().max().item()
    if worst != 0:
        raise ValueError(f"wrong numbers: off by {worst}")


CAPABILITIES: dict[str, Callable[[torch.device], str]] = {
    "fp16_dot": _product(torch.float16),
    "bf16_dot": _product(torch.bfloat16),
    "fp8_e4m3_dot": _product(torch.float8_e4m3fn),
    "fp8_e5m2_dot": _product(torch.float8_e5m2),
    "int8_dot": _product(torch.int8, tl.int32),
    "async_copy": _async_copy,
    "fp16_atomics": _atomics,
    "cooperative_launch": _cooperative,
}
