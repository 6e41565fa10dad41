"""The Triton matmul with weights of 4 bits: right in the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import int4_kernel_checks as checks
import pytest
import torch
from kernel_tests import kernel_tests

from tcport.kernels import int4
from tcport.kernels.triton_int4 import w4a16_matmul

interpreted, compiled, test_agrees_with_the_definition, test_compiles = kernel_tests(checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", checks.SHAPES)
def test_on_a_gpu(shape: str, dtype: torch.dtype) -> None:
    arguments = checks.operands(shape, dtype)
    expected = int4.w4a16_matmul(*arguments, compute_dtype=torch.float64).double()
    out = w4a16_matmul(*checks.operands(shape, dtype, "cuda"), launch=lambda kernel: kernel)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    limit = tolerance * float(expected.abs().max())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=limit)
