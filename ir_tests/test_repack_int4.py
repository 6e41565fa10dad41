"""4-bit weights in other layouts than the kernel's: AWQ's, and such as only their values tell; and what is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport.device import override_profile
from tcport.device.catalog import catalogue_profile
from tcport.kernels.int4 import w4a16_matmul
from tcport.report import GraphReport
from tcport.testing import assert_equivalent, lower_on
from tcport.testing.graphs import interpreted

GROUPS, GROUP, WIDTH = 2, 32, 24
DEPTH = GROUPS * GROUP
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The column that each place of a word holds, from the lowest bits on."""
H200 = catalogue_profile("h200")


def weights(dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
    """``x [3, DEPTH]``, levels ``[DEPTH, WIDTH]``, scales and zero points of each group."""
    rng = torch.Generator().manual_seed(6)
    x = torch.randn(3, DEPTH, generator=rng).to(dtype)
    levels, zeros = (torch.randint(0, 16, (rows, WIDTH), generator=rng).int() for rows in (DEPTH, GROUPS))
    return x, levels, (torch.rand(GROUPS, WIDTH, generator=rng) + 0.1).to(dtype), zeros


def awq(levels: Tensor) -> Tensor:
    """Levels packed by hand, eight columns a word, as an int32."""
    words = torch.zeros(levels.shape[0], levels.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(AWQ_ORDER):
        words |= levels[:, column::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def by_index(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """As AutoAWQ does: unpacked, columns chosen by a list, scales repeated."""
    levels = (packed[:, :, None] >> torch.arange(0, 32, 4)[None, None, :]).view(DEPTH, -1)
    order = torch.arange(WIDTH).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].view(-1)
    levels = levels[:, order].to(torch.int8) & 15
    return x @ ((levels - zeros.repeat_interleave(GROUP, 0)) * scales.repeat_interleave(GROUP, 0))


def by_order_of_shifts(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    shifts = ((torch.arange(2) * 4)[None, :] + torch.arange(4)[:, None]).reshape(8) * 4
    levels = ((packed[:, :, None] >> shifts) & 15).reshape(GROUPS, GROUP, WIDTH)
    return x @ ((levels - zeros[:, None]) * scales[:, None]).view(DEPTH, WIDTH)


def by_transposition(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    levels = (packed[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    levels = levels.view(DEPTH, -1, 2, 4).transpose(2, 3).reshape(GROUPS, GROUP, WIDTH)
    return torch.mm(x, (scales[:, None] * (levels - zeros[:, None])).view(DEPTH, WIDTH))


def on_an_h200(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, GraphReport]:
    """What a function's graph gives after the passes of a compile for a GPU, which is not needed to run it."""
    torch.compiler.reset()
    report = GraphReport()
    result = interpreted(fn, report=report, profile=lambda device: H200)(*args)
    torch.compiler.reset()
    return result, report


def matches(report: GraphReport) -> tuple[int, tuple[str, ...]]:
    (found,) = (p for p in report.passes if p.name == "repack_int4_matmul")
    return found.matches, found.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", [by_index, by_order_of_shifts, by_transposition])
def test_weights_in_awqs_order(spelling: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, levels, scales, zeros = weights(dtype)
    wide = (levels.double() - zeros.double().repeat_interleave(GROUP, 0)) * scales.double().repeat_interleave(GROUP, 0)
    result, report = on_an_h200(spelling, x, awq(levels), scales, zeros)
    assert matches(report)[0] == 1, matches(report)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = x.double() @ wide
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    nodes = lower_on(H200, spelling, x.half(), awq(levels), scales.half(), zeros)
    assert [(node.op, node.kernel) for node in nodes] == [("tcport::w4a16_matmul", "triton_w4a16_matmul")]


def test_what_takes_its_place_compiles() -> None:
    """On a CPU that passes for an H200, with the kernel that runs on both."""
    x, levels, scales, zeros = weights(torch.float32)
    torch.compiler.reset()
    with override_profile(dataclasses.replace(H200, device_type="cpu")):
        options: Any = {"kernel": "torch_w4a16_matmul"}
        compiled = torch.compile(by_index, backend="tcport", fullgraph=True, options=options)
        result = compiled(x, awq(levels), scales, zeros)
    report = tcport.last_report()
    assert report is not None
    assert [(node.op, node.kernel) for node in report.nodes] == [("tcport::w4a16_matmul", "torch_w4a16_matmul")]
    torch.testing.assert_close(result, by_index(x, awq(levels), scales, zeros), rtol=1e-5, atol=1e-4)
    torch.compiler.reset()


def shifts_in_a_buffer(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, shifts: Tensor) -> Tensor:
    """GPTQ's layout, in a model that keeps its shifts: their values are not in the graph."""
    levels = ((packed[:, None, :] >> shifts[None, :, None]) & 15).reshape(GROUPS, GROUP, WIDTH)
    return x @ ((levels - zeros[:, None]) * scales[:, None]).view(-1, WIDTH)


@pytest.mark.parametrize("backwards", [False, True])
def test_shifts_may_have_any_values(backwards: bool) -> None:
    x, levels, scales, zeros = weights(torch.float32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    shifts = shifts.flip(0) if backwards else shifts
    packed = (levels.view(-1, 8, WIDTH) << shifts[None, :, None]).sum(1, dtype=torch.int32)
    result, report = on_an_h200(shifts_in_a_buffer, x, packed, scales, zeros, shifts)
    assert matches(report)[0] == 1, matches(report)
    words = (levels.view(-1, 8, WIDTH) << torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None]).sum(
        1, dtype=torch.int32
    )
    expected = w4a16_matmul(x, words, scales, zeros, compute_dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


def five_bits(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    levels = ((packed[:, :, None] >> torch.arange(0, 32, 4)) & 31).reshape(GROUPS, GROUP, WIDTH)
    return x @ ((levels - zeros[:, None]) * scales[:, None]).view(DEPTH, WIDTH)


def changed_after_the_mask(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    levels = (((packed[:, :, None] >> torch.arange(0, 32, 4)) & 15) + 1).reshape(GROUPS, GROUP, WIDTH)
    return x @ ((levels - zeros[:, None]) * scales[:, None]).view(DEPTH, WIDTH)


@pytest.mark.parametrize("model", [five_bits, changed_after_the_mask])
def test_other_integers_are_left_with_the_reason(model: Callable[..., Tensor]) -> None:
    x, levels, scales, zeros = weights(torch.float32)
    result, report = on_an_h200(model, x, awq(levels), scales, zeros)
    assert matches(report) == (0, matches(report)[1])
    assert "not known to have 4 bits" in matches(report)[1][0]
    torch.testing.assert_close(result, model(x, awq(levels), scales, zeros))


def test_a_cpu_has_no_kernel_to_repack_for() -> None:
    x, levels, scales, zeros = weights(torch.float32)
    assert_equivalent(by_transposition, x, awq(levels), scales, zeros, matches={"repack_int4_matmul": 0})


def test_many_rows_are_left() -> None:
    x, levels, scales, zeros = weights(torch.float32)
    _, report = on_an_h200(by_transposition, x.repeat(11, 1), awq(levels), scales, zeros)
    assert matches(report)[0] == 0
    assert any("dequantised once" in note for note in matches(report)[1])
