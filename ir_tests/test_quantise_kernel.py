"""The Triton kernels that end in a quantise: right in the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
import quantise_kernel_checks as checks
import torch
from kernel_tests import kernel_tests

from tcport.device import device_profile
from tcport.lowering.foreign import ForeignCall, foreign_spec, overload_of
from tcport.lowering.registry import rows

interpreted, compiled, test_agrees_with_the_definition, test_compiles = kernel_tests(checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", checks.HOWS)
@pytest.mark.parametrize("op", ["silu_mul_quantise", "add_rms_norm_quantise"])
def test_on_a_gpu(op: str, how: str, dtype: torch.dtype) -> None:
    """The first candidate of the chain; a value one step off where the layer's value is on a rounding boundary."""
    arguments = [*checks.operands(op, dtype, 1500, True), *checks.HOWS[how]]
    arguments[0][0, 0] = arguments[0][1, 2] = arguments[1][0, 0] = 1.0
    call = ForeignCall.of(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments))
    row = next(row for row in rows(f"tcport::{op}") if row.name.startswith("triton"))
    candidate = row.lower(foreign_spec(call), device_profile(torch.device("cuda")))
    *_, codes, scales = candidate.run(call, lambda kernel: kernel)  # type: ignore[union-attr]
    *_, expected, expected_scales = overload_of(f"tcport::{op}")(*arguments)
    checks.one_step(codes.cpu(), expected, share=0.02)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=2e-2, atol=0)
