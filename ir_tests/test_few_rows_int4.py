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
from tcport.kernels.int4 import FewRowsTile, few_rows_tile

SHAPES: dict[str, tuple[Any, ...]] = {
    "one row, one step of four warps": (1, 512, 32, 128, torch.int32, FewRowsTile(warps=4, ahead=1)),
    "eight rows, columns past the end": (8, 1024, 40, 256, torch.int8, FewRowsTile(warps=4, ahead=2)),
    "rows and depth past the end, three rounds": (13, 1536, 32, 128, torch.uint8, FewRowsTile(warps=2, ahead=2)),
    "unrolled, depth past the end of a round": (
        5,
        2560,
        40,
        128,
        torch.int8,
        FewRowsTile(warps=4, ahead=2, unrolled=True),
    ),
    "unrolled, all words on their way from the start": (
        8,
        1024,
        32,
        128,
        None,
        FewRowsTile(warps=4, ahead=2, unrolled=True),
    ),
    "two blocks of rows, no zero points": (20, 640, 96, 640, None, FewRowsTile(block_n=64, warps=4, ahead=1)),
}
AS_IN_MODELS: dict[str, tuple[Any, ...]] = {
    f"{rows} rows of {depth} x {width}": (rows, depth, width, 128, torch.int32, few_rows_tile(rows, width, units=132))
    for rows in (1, 5, 16, 32)
    for depth, width in ((4096, 4096), (4096, 14336), (14336, 512))
}
"""With an H200's tiles."""


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


@pytest.mark.parametrize("units", [None, 20, 108, 132])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32])
def test_programs_have_enough_warps_or_neighbours(rows: int, units: int | None) -> None:
    for width in (32, 512, 4096, 6144, 14336, 152064):
        tile = few_rows_tile(rows, width, units)
        assert tile.shared_bytes <= int4.FEW_ROWS_SHARED
        programs = -(-rows // 16) * -(-width // tile.block_n)
        assert tile.warps == 8 or units is None or programs >= units
        assert not tile.unrolled or rows <= 8  # registers hold four steps of no more


def test_the_tiles_of_an_h200() -> None:
    assert few_rows_tile(1, 4096, 132) == FewRowsTile(32, warps=8, ahead=4, unrolled=True)
    assert few_rows_tile(8, 14336, 132) == FewRowsTile(32, warps=4, ahead=4)
    assert few_rows_tile(16, 4096, 132) == FewRowsTile(32, warps=8, ahead=2)
    assert few_rows_tile(16, 14336, 132) == FewRowsTile(64, warps=4, ahead=4)
    assert few_rows_tile(32, 4096, 132) == FewRowsTile(32, warps=4, ahead=4)


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
