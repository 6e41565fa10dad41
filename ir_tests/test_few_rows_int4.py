"""The Gluon matmul of few rows with weights of 4 bits: its logic in PyTorch, what it compiles to, and where it runs."""

from __future__ import annotations

from typing import Any

import int4_kernel_checks as checks
import pytest
import torch
from fake_gluon import Launched

import tcport
from tcport.kernels import gluon_int4, int4
from tcport.kernels.gluon_int4 import few_rows_matmul
from tcport.kernels.int4 import FewRowsTile

SHAPES: dict[str, tuple[Any, ...]] = {
    "one row, one step of four warps": (1, 512, 32, 128, torch.int32, FewRowsTile(warps=4, ahead=1)),
    "eight rows, columns past the end": (8, 1024, 40, 256, torch.int8, FewRowsTile(warps=4, ahead=2)),
    "rows and depth past the end, three rounds": (13, 1536, 32, 128, torch.uint8, FewRowsTile(warps=2, ahead=2)),
    "two blocks of rows, no zero points": (20, 640, 96, 640, None, FewRowsTile(block_n=64, warps=4, ahead=1)),
}
AS_IN_MODELS: dict[str, tuple[Any, ...]] = {
    "one row": (1, 4096, 4096, 128, torch.int32, FewRowsTile()),
    "16 rows": (16, 4096, 4096, 128, torch.int32, FewRowsTile()),
    "deep": (5, 14336, 512, 128, torch.int32, FewRowsTile()),
}


def closely(actual: torch.Tensor, arguments: list[Any], dtype: torch.dtype) -> None:
    expected = int4.w4a16_matmul(*arguments, compute_dtype=torch.float64).double()
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    limit = tolerance * float(expected.abs().max())
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_its_logic_agrees_with_the_definition(shape: str, dtype: torch.dtype) -> None:
    *sizes, tile = SHAPES[shape]
    arguments = checks.operands_of(*sizes, dtype=dtype)
    closely(few_rows_matmul(*arguments, launch=Launched(gluon_int4), tile=tile), arguments, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *AS_IN_MODELS])
def test_on_a_gpu(shape: str, dtype: torch.dtype) -> None:
    *sizes, tile = (SHAPES | AS_IN_MODELS)[shape]
    for together in (False, True):
        arguments = checks.operands_of(*sizes, dtype=dtype)
        if together:
            arguments[:2] = [a.contiguous() for a in arguments[:2]]
        given = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        closely(few_rows_matmul(*given, launch=lambda kernel: kernel, tile=tile), arguments, dtype)


@pytest.mark.gpu
def test_compiled_code_calls_it_as_one_operator() -> None:
    arguments = checks.operands_of(3, 512, 64, 128, torch.int8, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(lambda *given: -torch.ops.tcport.w4a16_matmul(*given), backend="tcport", fullgraph=True)
    with torch.no_grad():
        out = compiled(*arguments)
    closely(-out, [a.cpu() for a in arguments], torch.bfloat16)
    report = tcport.last_report()
    assert report is not None
    assert [node.kernel for node in report.nodes] == [
        "gluon_w4a16_matmul" if torch.version.hip is None else "triton_w4a16_matmul"
    ]
