"""The Triton kernels between attention calls: right in the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import layer_kernel_checks
import pytest
import torch
from kernel_tests import kernel_tests

from tcport.lowering.agreement import check_numbers
from tcport.lowering.registry import rows

interpreted, compiled, test_agrees_with_the_definition, test_compiles = kernel_tests(layer_kernel_checks)


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
