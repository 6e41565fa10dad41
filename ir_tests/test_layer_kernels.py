"""The Triton kernels between attention calls: right in the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import layer_kernel_checks
import pytest
import torch
from subprocess_results import run_in_subprocess

from tcport.lowering.agreement import check_numbers
from tcport.lowering.registry import rows


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return run_in_subprocess("layer_kernel_checks", "interpreted", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    return run_in_subprocess("layer_kernel_checks", "compiled")


@pytest.mark.parametrize("name", layer_kernel_checks.interpreted())
def test_agrees_with_the_definition(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", layer_kernel_checks.compiled())
def test_compiles(compiled: dict[str, str], name: str) -> None:
    assert compiled[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    gate, up = layer_kernel_checks.rows(dtype, 1500, True)
    weight = torch.linspace(0.5, 2, 1500, dtype=dtype)
    samples = {"silu_mul": [(gate, up)], "add_rms_norm": [(gate, up, weight, 1e-5)]}
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for op, arguments in samples.items():
        for row in rows(f"tcport::{op}"):
            assert check_numbers(row, lambda given=arguments: given, (tolerance, tolerance), "cuda") == 1
