"""Matmuls with weights of 4 bits: the operator, the spellings of its dequantise, and those that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport.device.catalog import catalogue_profile
from tcport.kernels.int4 import w4a16_matmul
from tcport.lowering.agreement import check_numbers, check_results
from tcport.lowering.registry import rows
from tcport.testing import assert_equivalent, assert_graph, capture, lower_on, run_pass

GROUPS, GROUP, WIDTH = 2, 32, 24


def operands(dtype: torch.dtype, rows: int = 3, zeros_dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(3)
    depth = GROUPS * GROUP
    x = torch.randn(rows, depth, generator=rng).to(dtype)
    packed = torch.randint(-(2**31), 2**31, (depth // 8, WIDTH), generator=rng).to(torch.int32)
    scales = (torch.rand(GROUPS, WIDTH, generator=rng) + 0.1).to(dtype)
    return x, packed, scales, torch.randint(0, 16, (GROUPS, WIDTH), generator=rng).to(zeros_dtype)


def test_the_definition_on_weights_packed_by_hand() -> None:
    """Words of hexadecimal digits: the last digit is the first weight; the highest may make the word negative."""
    packed = torch.tensor([[0x76543210], [0xFEDCBA98 - 2**32]], dtype=torch.int32)
    scales, zeros = torch.tensor([[0.5], [2.0]]), torch.tensor([[3], [8]], dtype=torch.int32)
    first = [(q - 3) * 0.5 for q in range(8)]
    second = [(q - 8) * 2.0 for q in range(8, 16)]
    weights = w4a16_matmul(torch.eye(16), packed, scales, zeros)
    assert weights.flatten().tolist() == [*first, *second]
    symmetric = w4a16_matmul(torch.ones(1, 16), packed, scales, None)
    assert symmetric.item() == sum((q - 8) * 0.5 for q in range(8)) + sum(second)


def samples() -> Iterator[tuple[Any, ...]]:
    for dtype in (torch.float32, torch.float16):
        x, packed, scales, zeros = operands(dtype)
        yield x, packed, scales, zeros
        yield x, packed, scales, None
    whole = scales[:, :1].expand(-1, WIDTH)[:2]  # groups of 128, which the kernel in Gluon takes
    yield torch.ones(3, 256, dtype=torch.float16), packed.repeat(4, 1)[:32], whole, None


def test_every_candidate_agrees_with_the_operator() -> None:
    for row in rows("tcport::w4a16_matmul"):
        check_results(row, samples)
        ran = check_numbers(row, samples, (2e-3, 2e-2), "cpu")
        assert ran == (len(list(samples())) if row.name.startswith("torch") else 0)
    for arguments in samples():
        torch.library.opcheck(torch.ops.tcport.w4a16_matmul.default, arguments)


def levels_of(packed: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=dtype)
    return ((packed[:, None, :] >> shifts[None, :, None]) & 15).reshape(GROUPS, GROUP, WIDTH)


def grouped(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return x @ ((levels_of(packed) - zeros[:, None]) * scales[:, None]).view(-1, WIDTH)


def cast_first(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return torch.mm(x, (scales[:, None] * (levels_of(packed, None) - zeros[:, None]).to(x.dtype)).view(-1, WIDTH))


def bitwise(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).unsqueeze(0).unsqueeze(-1)
    levels = torch.bitwise_and(torch.bitwise_right_shift(packed.unsqueeze(1), shifts), 15)
    return x @ ((levels.reshape(GROUPS, GROUP, WIDTH) - zeros.unsqueeze(1)) * scales.unsqueeze(1)).reshape(-1, WIDTH)


def symmetric(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return x @ ((levels_of(packed) - 8) * scales[:, None]).view(-1, WIDTH)


def batched(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return x[None] @ ((levels_of(packed) - zeros[:, None]) * scales[:, None]).view(-1, WIDTH)


@pytest.mark.parametrize(
    ("spelling", "dtype", "zeros_dtype", "dynamic"),
    [
        *((spelling, torch.bfloat16, torch.int32, False) for spelling in (grouped, cast_first, bitwise, symmetric)),
        (batched, torch.float16, torch.int8, False),
        (grouped, torch.float32, torch.uint8, False),
        (grouped, torch.float32, torch.int32, True),
    ],
)
def test_weights_as_models_dequantise_them(
    spelling: Callable[..., Tensor], dtype: torch.dtype, zeros_dtype: torch.dtype, dynamic: bool
) -> None:
    args = operands(dtype, zeros_dtype=zeros_dtype)
    if not dynamic:
        graph = capture(spelling, *args)
        assert run_pass("fuse_int4_matmul", graph, matches=1).notes == ()
        assert_graph(graph, "CHECK: tcport.w4a16_matmul\nCHECK-NOT: aten.mm\nCHECK-NOT: rshift\nCHECK-NOT: aten.mul")
    mark = torch._dynamo.mark_static
    for weight in args[1:]:
        mark(weight)
    assert_equivalent(spelling, *args, matches={"fuse_int4_matmul": 1}, dynamic=dynamic)


@pytest.mark.parametrize(("rows", "matches"), [(32, 1), (33, 0)])
def test_many_rows_are_left(rows: int, matches: int) -> None:
    graph = capture(grouped, *operands(torch.float32, rows))
    report = run_pass("fuse_int4_matmul", graph, matches=matches)
    assert any("dequantised once" in note for note in report.notes) == (matches == 0)


def test_an_open_number_of_rows_is_few_or_many() -> None:
    """One graph up to 32 rows, one beyond, each right for every number on its side; no third."""
    torch.compiler.reset()
    compiled = torch.compile(grouped, backend="tcport", fullgraph=True)
    before, kernels = tcport.compile_count(), []
    for number in (3, 30, 32, 33, 300, 7):
        args = operands(torch.float32, number)
        torch._dynamo.mark_dynamic(args[0], 0)
        torch.testing.assert_close(compiled(*args), grouped(*args), rtol=1e-4, atol=1e-3)
        report = tcport.last_report()
        assert report is not None
        kernels.append([node.op for node in report.nodes])
    assert tcport.compile_count() - before == 2
    assert kernels[:5] == [["tcport::w4a16_matmul"]] * 3 + [[]] * 2  # of the last compile: the first graph takes the 7


def test_what_it_saved_is_reported() -> None:
    graph = capture(grouped, *operands(torch.float16))
    report = run_pass("fuse_int4_matmul", graph, matches=1)
    # Arange, shift, mask, difference, scale, product: one operation is left. Gone are the shifts (8), the words (twice)
    # and the levels less their zero points in int32, and the weights in fp16.
    weights = GROUPS * GROUP * WIDTH
    assert (report.saved_operations, report.saved_bytes) == (5, 2 * (8 * 4 + weights * (3 * 4 + 2)))


def other_mask(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    levels = ((packed[:, None, :] >> shifts[None, :, None]) & 7).reshape(GROUPS, GROUP, WIDTH)
    return x @ ((levels - zeros[:, None]) * scales[:, None]).view(-1, WIDTH)


def other_order(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    shifts = torch.arange(28, -4, -4, dtype=torch.int32)
    levels = ((packed[:, None, :] >> shifts[None, :, None]) & 15).reshape(GROUPS, GROUP, WIDTH)
    return x @ ((levels - zeros[:, None]) * scales[:, None]).view(-1, WIDTH)


def other_midpoint(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return x @ ((levels_of(packed) - 7) * scales[:, None]).view(-1, WIDTH)


def strided_groups(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    levels = levels_of(packed).view(GROUP, GROUPS, WIDTH)
    return x @ ((levels - zeros[None]) * scales[None]).view(-1, WIDTH)


def shared_weights(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    weight = ((levels_of(packed) - zeros[:, None]) * scales[:, None]).view(-1, WIDTH)
    return x @ weight, weight.sum(0)


def wide_scales(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return x @ ((levels_of(packed) - zeros[:, None]) * scales.float()[:, None]).to(x.dtype).view(-1, WIDTH)


@pytest.mark.parametrize(
    "near_miss", [other_mask, other_order, other_midpoint, strided_groups, shared_weights, wide_scales]
)
def test_what_is_another_computation_is_left(near_miss: Callable[..., Any]) -> None:
    run_pass("fuse_int4_matmul", capture(near_miss, *operands(torch.float16)), matches=0)


def test_shifts_of_unknown_values_are_left() -> None:
    def by_buffer(shifts: Tensor, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        levels = ((packed[:, None, :] >> shifts[None, :, None]) & 15).reshape(GROUPS, GROUP, WIDTH)
        return x @ ((levels - zeros[:, None]) * scales[:, None]).view(-1, WIDTH)

    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    run_pass("fuse_int4_matmul", capture(by_buffer, shifts, *operands(torch.float16)), matches=0)


def test_compiled_the_result_is_that_of_the_definition() -> None:
    args = operands(torch.float32)
    with torch.no_grad():
        out = torch.compile(grouped, backend="tcport", fullgraph=True)(*args)
    x, packed, scales, zeros = args
    expected = w4a16_matmul(x, packed, scales, zeros, compute_dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    report = tcport.last_report()
    assert report is not None
    assert [(n.op, n.kernel) for n in report.nodes] == [("tcport::w4a16_matmul", "torch_w4a16_matmul")]


def test_which_kernel_a_gpu_gets_for_groups_of_128() -> None:
    x, packed = torch.ones(3, 256, dtype=torch.bfloat16), torch.zeros(32, WIDTH, dtype=torch.int32)
    scales, zeros = torch.ones(2, WIDTH, dtype=torch.bfloat16), torch.zeros(2, WIDTH, dtype=torch.int8)
    for device, kernel in {"h200": "gluon", "a100": "gluon", "rtx4090": "gluon", "mi300x": "triton"}.items():
        (node,) = lower_on(catalogue_profile(device), torch.ops.tcport.w4a16_matmul, x, packed, scales, zeros)
        assert node.kernel == f"{kernel}_w4a16_matmul", device
    (node,) = lower_on(
        catalogue_profile("h200"), torch.ops.tcport.w4a16_matmul, x.float(), packed, scales.float(), zeros
    )
    assert node.kernel == "triton_w4a16_matmul"
    assert "16-bit floats" in node.rejected[0].reason


def test_a_gpu_gets_the_kernel_for_few_rows_and_the_reason_for_many() -> None:
    (few,) = lower_on(catalogue_profile("h200"), grouped, *operands(torch.bfloat16, 16))
    assert few.kernel == "triton_w4a16_matmul"  # groups of 64: the one for tensor cores takes 128
    assert lower_on(catalogue_profile("h200"), grouped, *operands(torch.bfloat16, 512)) == []
    (many,) = lower_on(catalogue_profile("h200"), torch.ops.tcport.w4a16_matmul, *operands(torch.bfloat16, 512))
    assert many.kernel == "torch_w4a16_matmul"
    assert "more than 32 rows" in many.rejected[0].reason
