"""The Gluon matmul of few rows with weights of 4 bits: its logic in PyTorch, what it compiles to, and where it runs."""

from __future__ import annotations

import itertools
from typing import Any

import int4_kernel_checks as checks
import pytest
import torch
from fake_gluon import Launched
from triton.backends.compiler import GPUTarget

import tcport
from tcport.fingerprint import triton_version
from tcport.kernels import gluon_int4, gluon_int4_product, int4
from tcport.kernels.gluon_int4 import few_rows_matmul
from tcport.kernels.int4 import FewRowsTile, few_rows_tile
from tcport.kernels.offline import record
from tcport.kernels.target import targeting

SHAPES: dict[str, tuple[Any, ...]] = {
    "one row, one step of four warps": (1, 512, 32, 128, torch.int32, FewRowsTile()),
    "eight rows, columns past the end, four steps": (8, 1024, 40, 256, torch.int8, FewRowsTile(2, 1, ahead=2)),
    "staged, rows and depth past the end": (13, 1536, 32, 128, torch.uint8, FewRowsTile(2, 2, 2, 2, staged=True)),
    "staged, depth past the end of the second of two steps": (
        5,
        2560,
        40,
        128,
        torch.int8,
        FewRowsTile(16, 1, 1, 2, True),
    ),
    "all words on their way from the start": (8, 1024, 32, 128, None, FewRowsTile(4, 1, 1, 2)),
    "later words before a product": (8, 1536, 40, 128, torch.int8, FewRowsTile(2, 1, ahead=2, early=True)),
    "later words before a product, staged": (
        13,
        1792,
        70,
        128,
        torch.int32,
        FewRowsTile(2, 2, staged=True, early=True),
    ),
    "more on their way than there is": (9, 256, 70, 128, torch.int32, FewRowsTile(4, 2, 1, 3)),
    "four steps without a loop, depth past the end": (8, 3712, 40, 128, torch.int8, FewRowsTile(8, 1, ahead=4)),
    "two steps without a loop, 16 rows": (16, 1024, 40, 512, None, FewRowsTile(4, 1, ahead=2)),
    "two blocks of rows, no zero points": (20, 640, 96, 640, None, FewRowsTile(4, 1, 2, 1)),
}
"""Rows, depth, width, group, the dtype of the zero points, and the tile."""


def on_an_h200(rows: int, depth: int, width: int) -> FewRowsTile:
    return few_rows_tile(rows, depth, width, units=132, shared=227 * 1024)


WEIGHTS = ((4096, 4096), (4096, 6144), (4096, 14336), (14336, 512), (14336, 6144), (11008, 4104), (4224, 11011))
AS_IN_MODELS: dict[str, tuple[Any, ...]] = {
    f"{rows} rows of {depth} x {width}": (rows, depth, width, 128, torch.int32, on_an_h200(rows, depth, width))
    for rows in (1, 5, 16, 32)
    for depth, width in WEIGHTS
}


TIMED = ((4096, 4096, 16), (4096, 14336, 32), (14336, 4096, 16))
"""Depth, width and most rows."""


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
    closely(few_rows_matmul(*arguments, launch=Launched(gluon_int4_product, gluon_int4), tile=tile), arguments, dtype)


@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize(("depth", "width", "most"), TIMED)
def test_the_tiles_of_an_h200_agree_with_the_definition(depth: int, width: int, most: int, rows: int) -> None:
    tile = on_an_h200(min(rows, most), depth, width)
    arguments = checks.operands_of(rows, depth, tile.block_n + 8, 128, torch.int32, dtype=torch.bfloat16)
    launch = Launched(gluon_int4_product, gluon_int4)
    closely(few_rows_matmul(*arguments, launch=launch, tile=tile), arguments, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_x_in_any_place(dtype: torch.dtype) -> None:
    """Where two neighbours are no aligned word of 32 bits: an odd distance of rows, an odd first element."""
    x, *weights = checks.operands_of(3, 512, 32, 128, torch.int32, dtype=dtype)
    for first, apart in ((0, 515), (1, 514), (0, 514)):
        memory = torch.zeros(3 * 516 + 1, dtype=dtype)
        rows = memory.as_strided((3, 512), (apart, 1), first)
        rows.copy_(x)
        launch = Launched(gluon_int4_product, gluon_int4)
        closely(few_rows_matmul(rows, *weights, launch=launch), [x, *weights], dtype)


@pytest.mark.parametrize("zero", [-128, -1, 0, 128])
@pytest.mark.parametrize("rows", [8, 16])
def test_zero_points_of_any_size(rows: int, zero: int) -> None:
    x, packed, scales, _ = checks.operands_of(rows, 512, 32, 128, None, dtype=torch.bfloat16)
    arguments = [x, packed, scales, torch.full(scales.shape, zero, dtype=torch.int32)]
    closely(few_rows_matmul(*arguments, launch=Launched(gluon_int4_product, gluon_int4)), arguments, torch.bfloat16)


@pytest.mark.parametrize("shared", [32 * 1024, 99 * 1024, 227 * 1024])
@pytest.mark.parametrize("units", [None, 20, 108, 132])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32])
def test_programs_fit_an_sm_and_are_as_many(rows: int, units: int | None, shared: int) -> None:
    for depth, width in itertools.product((128, 4096, 11008, 53248), (32, 512, 4096, 6144, 11011, 14336, 152064)):
        tile = few_rows_tile(rows, depth, width, units, shared)
        assert tile.shared_bytes(rows, depth) <= shared
        of_128_columns = -(-rows // 16) * -(-width // 128)
        match tile.warps_k * tile.warps_n:
            case 16:
                programs = -(-rows // 16) * -(-width // tile.block_n)
                assert programs <= (units or 0) or (rows <= 8 and (depth > 4096 or width % 32))
            case 8:
                assert rows <= 8
                assert tile.ahead >= tile.steps(depth)
            case 4:
                assert rows > 8
                assert of_128_columns > (units or 0) or 2 * 16 * depth > shared
            case other:
                raise AssertionError(f"{other} warps do not share an SM's registers without a rest")


def test_the_tiles_of_an_h200() -> None:
    """Where weights were timed, and where others begin: rows of ``x`` no longer fit, or their programs an SM each."""
    narrow = FewRowsTile(warps_k=16, ahead=2, staged=True, overlapped=True, early=True)
    assert [on_an_h200(rows, 4096, 4096) for rows in (1, 8)] == [narrow] * 2
    assert [on_an_h200(rows, 14336, 4096) for rows in (1, 8)] == [narrow] * 2
    assert on_an_h200(16, 4096, 4096) == FewRowsTile(warps_k=16, ahead=2, overlapped=True)
    assert on_an_h200(16, 6144, 4096) == FewRowsTile(warps_k=16, ahead=2, staged=True, overlapped=True)
    assert on_an_h200(16, 14336, 4096) == FewRowsTile(warps_k=16, overlapped=True)
    assert on_an_h200(8, 16384, 4096) == FewRowsTile(warps_k=16, overlapped=True, early=True)
    wide = FewRowsTile(warps_k=4, warps_n=4, staged=True, overlapped=True, early=True)
    assert [on_an_h200(rows, 4096, 14336) for rows in (1, 8)] == [wide] * 2
    assert [on_an_h200(8, *weights) for weights in ((8192, 14336), (4096, 14340), (8192, 11008))] == [wide] * 3
    assert on_an_h200(8, 4096, 11008) == FewRowsTile(8, ahead=4, overlapped=True)  # too few blocks for a wide one each
    assert on_an_h200(8, 4096, 28672) == FewRowsTile(8, ahead=4, overlapped=True)
    assert on_an_h200(8, 4096, 28676) == FewRowsTile(warps_k=8, warps_n=2, blocks=2)
    assert on_an_h200(8, 16384, 14336) == FewRowsTile(warps_k=8, warps_n=2, blocks=2)
    assert on_an_h200(16, 4096, 14336) == FewRowsTile(warps_k=4, warps_n=4, staged=True, early=True)
    assert on_an_h200(32, 4096, 14336) == FewRowsTile(overlapped=True, early=True)
    assert on_an_h200(16, 8192, 14336) == FewRowsTile(overlapped=True, early=True)
    assert on_an_h200(32, 4096, 4096) == FewRowsTile(warps_k=8, warps_n=2, ahead=2, staged=True)
    assert on_an_h200(32, 14336, 4096) == FewRowsTile(warps_k=8, warps_n=2)


def test_programs_of_eight_warps_leave_registers_for_another() -> None:
    """Triton 3.6's ptxas keeps to 128 of them by itself; the kernel that was timed was not told to."""
    untold = None if triton_version().startswith("3.6.") else 128
    meta = [a.to("meta") for a in checks.operands_of(1, 512, 32, 128, torch.int8, dtype=torch.float16)]
    bounds = []
    for tile in (FewRowsTile(4), FewRowsTile(8), FewRowsTile(4, 2), FewRowsTile(16), FewRowsTile(8, 2)):
        (launch,) = record(few_rows_matmul, *meta, tile=tile)
        bounds.append(launch.options.get("maxnreg"))
    assert bounds == [None, untold, untold, None, None]


def test_launches_overlap_where_the_gpu_can() -> None:
    meta = [a.to("meta") for a in checks.operands_of(1, 512, 32, 128, torch.int8, dtype=torch.float16)]
    for arch, overlapped in ((80, False), (90, True), (100, True)):
        with targeting(GPUTarget("cuda", arch, 32)):
            launches = record(few_rows_matmul, *meta, tile=FewRowsTile(overlapped=True))
            launches += record(few_rows_matmul, *meta, tile=FewRowsTile())
        assert [launch.arguments["OVERLAPPED"] for launch in launches] == [overlapped, False]
        assert [launch.options.get("launch_pdl", False) for launch in launches] == [overlapped, False]


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
@pytest.mark.parametrize("staged", [False, True])
def test_rows_of_x_in_any_place_on_a_gpu(staged: bool) -> None:
    x, *weights = checks.operands_of(3, 512, 32, 128, torch.int32, dtype=torch.float16, device="cuda")
    for first, apart in ((0, 515), (1, 514), (0, 514), (2, 520), (0, 520)):
        rows = torch.zeros(3 * 520 + 2, dtype=torch.float16, device="cuda").as_strided((3, 512), (apart, 1), first)
        rows.copy_(x)
        out = few_rows_matmul(rows, *weights, launch=lambda kernel: kernel, tile=FewRowsTile(staged=staged))
        closely(out, [a.cpu() for a in (x, *weights)], torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_overlapped_launches_wait_for_what_they_read(rows: int) -> None:
    """Each matmul takes the result of the one before, eagerly and in a graph, as where each is waited for."""
    x, packed, scales, zeros = checks.operands_of(
        rows, 1024, 1024, 128, torch.int8, dtype=torch.bfloat16, device="cuda"
    )
    tile = few_rows_tile(rows, 1024, 1024, units=132, shared=99 * 1024)
    assert tile.overlapped
    scales /= 8

    def chained(wait: bool) -> torch.Tensor:
        found = x
        for _ in range(20):
            found = few_rows_matmul(found, packed, scales, zeros, launch=lambda kernel: kernel, tile=tile)
            if wait:
                torch.cuda.synchronize()
        return found

    expected = chained(wait=True)
    assert expected.isfinite().all()
    assert expected.any()
    assert torch.equal(chained(wait=False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chained(wait=False)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


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
