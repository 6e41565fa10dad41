"""Norms and gated products that are quantised: the operators, the spellings taken in, and those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch.utils._pytree import tree_leaves

import tcport
from tcport.device.catalog import catalogue_profile
from tcport.kernels import layers
from tcport.kernels.quantise import quantise
from tcport.lowering.agreement import check_numbers, check_results
from tcport.lowering.registry import rows
from tcport.testing import assert_equivalent, assert_graph, capture, lower_on, run_pass

FP8 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def test_the_definition_on_numbers_worked_out_by_hand() -> None:
    """e4m3 has 3 bits of mantissa: 17 and 19 lie between 16, 18 and 20, and are rounded to the even one."""
    half = torch.tensor(0.5)
    codes, scales = quantise(torch.tensor([8.5, 9.5, -0.25, 1000.0, -INF]), half, FP8)
    assert codes.float().tolist() == [16.0, 20.0, -0.5, 448.0, -448.0]
    assert scales.shape == (0,)
    assert quantise(torch.tensor([1.25, -1.75, 1000.0, -1000.0]), half, torch.int8)[0].tolist() == [2, -4, 127, -128]
    assert quantise(torch.tensor([5.0, -7.0]), half, torch.int8, True)[0].tolist() == [2, -4]

    codes, scales = quantise(torch.tensor([[127.0, -2.5, 0.5], [0.0, 0.0, 0.0]]), None, torch.int8, False, 12.7)
    assert codes.tolist() == [[127, -2, 0], [0, 0, 0]]
    torch.testing.assert_close(scales, torch.tensor([[1.0], [0.1]]))
    codes, scales = quantise(torch.tensor([[224.0, -7.0], [1.0, NAN]]), None, FP8, False, 0.0, 0.25)
    assert codes[0].float().tolist() == [448.0, -14.0]
    assert scales[0].item() == 0.5
    assert bool(scales[1].isnan())
    assert bool(codes[1].float().isnan().all())
    assert quantise(torch.tensor([[1.0]]), None, FP8, False, 0.0, 0.25)[1].item() == 0.25


HOWS: tuple[tuple[Any, ...], ...] = (
    (torch.tensor(0.03), FP8),
    (torch.tensor([30.0]), torch.int8, True),
    (None, FP8, False, 0.0, 1e-3),
    (None, torch.int8, True, 1e-5),
)


def samples(op: str) -> Iterator[tuple[Any, ...]]:
    for dtype in (torch.float32, torch.float16):
        x = torch.linspace(-4, 4, 60, dtype=dtype)
        for how in HOWS:
            if op == "silu_mul_quantise":
                yield *x.view(3, 20).chunk(2, -1), *how
            else:
                yield x.view(6, 10), x.flip(0).view(10, 6).t(), torch.linspace(0.5, 1, 10, dtype=dtype), 1e-5, *how


@pytest.mark.parametrize("op", ["silu_mul_quantise", "add_rms_norm_quantise"])
def test_every_candidate_agrees_with_the_operator(op: str) -> None:
    for row in rows(f"tcport::{op}"):
        check_results(row, lambda: samples(op))
        ran = check_numbers(row, lambda: samples(op), (0.0, 0.0), "cpu")
        assert ran == (0 if row.name.startswith("triton") else len(list(samples(op))))
    for arguments in samples(op):
        torch.library.opcheck(getattr(torch.ops.tcport, op).default, arguments)


def static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = x.to(torch.float32) / scale
    return wide.clamp(-448, 448).to(FP8) if dtype == FP8 else wide.round().clamp(-128, 127).to(torch.int8)


def by_inverse(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = scale.reciprocal() * x.float()
    return torch.clamp(wide, -448.0, 448.0).to(FP8) if dtype == FP8 else wide.clamp(-128, 127).round().to(torch.int8)


def by_token(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = x.abs().max(dim=-1, keepdim=True).values.float().clamp(min=1e-5) / (448 if dtype == FP8 else 127)
    return static(x, scales, dtype), scales


def by_token_floor_on_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = (x.float().abs().amax(-1, keepdim=True) / (448.0 if dtype == FP8 else 127.0)).clamp(min=1 / 448 / 512)
    return static(x, scales, dtype), scales


def by_token_inverse(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = x.abs().amax(-1, keepdim=True).float() / (448 if dtype == FP8 else 127)
    wide = x * scales.reciprocal()
    return (wide.clamp(-448, 448).to(FP8) if dtype == FP8 else wide.round().clamp(-128, 127).to(torch.int8)), scales


SPELLINGS = (static, by_inverse, by_token, by_token_floor_on_scale, by_token_inverse)
Spelling = Callable[[Tensor, Tensor, torch.dtype], Any]


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(7)
    x, residual = (torch.randn(2, 3, 16, generator=rng).to(dtype) for _ in range(2))
    return x, residual, torch.linspace(0.5, 2, 16).to(dtype), torch.tensor([0.02])


def same_values(actual: Any, expected: Any) -> None:
    """8-bit values to one step, of which rounding may go either way; scales and sums to their dtype's rounding."""
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        step = 1.0 if a.dtype == torch.int8 else 0.0
        torch.testing.assert_close(a.float(), b.float(), atol=max(step, 1e-5), rtol=0.13 if a.dtype == FP8 else 1e-2)


@pytest.mark.parametrize(
    ("spelling", "dtype", "dynamic"),
    [
        *((spelling, dtype, False) for spelling in SPELLINGS for dtype in (torch.float32, torch.bfloat16)),
        (static, torch.bfloat16, True),
        (by_token, torch.float32, True),
    ],
)
@pytest.mark.parametrize("to", [FP8, torch.int8])
def test_what_is_quantised_as_models_write_it(
    spelling: Spelling, dtype: torch.dtype, to: torch.dtype, dynamic: bool
) -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        normed = rms_norm(total, (16,), weight, 1e-5)
        return total, spelling(normed.view(-1, 16), scale, to), spelling(silu(x) * residual, scale, to)

    args = inputs(dtype)
    expected = tree_leaves(step(*args))
    graph = capture(step, *args, dynamic=dynamic)
    for name in ("fuse_add_rms_norm", "fuse_silu_mul", "fuse_norm_quantise", "fuse_silu_mul_quantise"):
        report = run_pass(name, graph, matches=1)
        assert report.notes == ()
    assert_graph(graph, "CHECK-NOT: aten.abs\nCHECK-NOT: aten.clamp_min\nCHECK-NOT: aten.round\nCHECK-NOT: aten.div")
    if not dynamic:  # there sizes are inputs of the graph too
        same_values(torch.fx.Interpreter(graph).run(*args), expected)


def test_what_it_saved_is_reported() -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        return total, static(rms_norm(total, (16,), weight, 1e-5), scale, FP8)

    graph = capture(step, *inputs(torch.bfloat16))
    run_pass("fuse_add_rms_norm", graph, matches=1)
    report = run_pass("fuse_norm_quantise", graph, matches=1)
    # Norm, cast, division, two limits, cast: six operations become one. Stored and loaded no more: the norm in bf16,
    # and after it four values in fp32, of 96 elements each.
    assert (report.saved_operations, report.saved_bytes) == (5, 2 * 96 * (2 + 4 * 4))


def in_16_bits(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale.view(())).clamp(-448, 448).to(FP8)


def by_channel(x: Tensor, scale: Tensor) -> Tensor:
    return static(x, scale.expand(16) * torch.arange(1, 17), FP8)


def other_limit(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-240, 240).to(FP8)


def truncated(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-128, 127).to(torch.int8)


def another_rows_scale(x: Tensor, scale: Tensor) -> Tensor:
    scales = x.abs().amax(0, keepdim=True).float() / 448
    return static(x, scales, FP8)


def also_used(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return static(x, scale, FP8), x + 1


def unsaturated(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).to(FP8)


@pytest.mark.parametrize(
    ("near_miss", "said"),
    [
        (in_16_bits, "not scaled in fp32"),
        (by_channel, "scale has 16 elements"),
        (other_limit, ""),
        (truncated, ""),
        (another_rows_scale, ""),
        (also_used, "uses"),
        (unsaturated, ""),
    ],
)
def test_what_is_another_computation_is_left(near_miss: Callable[..., Any], said: str) -> None:
    def step(x: Tensor, residual: Tensor, scale: Tensor) -> Any:
        return near_miss(silu(x) * residual, scale)

    x, residual, _, scale = inputs(torch.bfloat16)
    graph = capture(step, x, residual, scale)
    run_pass("fuse_silu_mul", graph, matches=1)
    report = run_pass("fuse_silu_mul_quantise", graph, matches=0)
    assert said in " ".join(report.notes), report.notes


def test_a_sum_used_before_the_quantise_is_left() -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        normed = rms_norm(total, (16,), weight, 1e-5)
        largest = total.amax()
        return total, static(normed, scale * largest.float(), torch.int8)

    graph = capture(step, *inputs(torch.float32))
    run_pass("fuse_add_rms_norm", graph, matches=1)
    report = run_pass("fuse_norm_quantise", graph, matches=0)
    assert "before it" in report.notes[0]


def test_compiled_the_results_are_those_of_the_definition() -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        return total, *by_token(rms_norm(total, (16,), weight, 1e-5).view(-1, 16), scale, torch.int8)

    args = inputs(torch.float32)
    compiled = torch.compile(step, backend="tcport", fullgraph=True)
    with torch.no_grad():
        total, codes, scales = compiled(*args)
    x, residual, weight = (a.double() for a in args[:3])
    expected = layers.add_rms_norm(x, residual, weight, 1e-5, compute_dtype=torch.float64)
    wanted = quantise(expected[1].view(-1, 16), None, torch.int8, False, 1e-5, compute_dtype=torch.float64)
    torch.testing.assert_close(total, expected[0].float())
    torch.testing.assert_close(scales, wanted[1])
    torch.testing.assert_close(codes.int(), wanted[0].int(), atol=1, rtol=0)
    report = tcport.last_report()
    assert report is not None
    assert [(n.op, n.kernel) for n in report.nodes] == [
        ("tcport::add_rms_norm_quantise", "torch_add_rms_norm_quantise")
    ]
    assert "saves" in str(report)


def test_a_gpu_gets_the_kernels() -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        total = x + residual
        normed = rms_norm(total, (16,), weight, 1e-5)
        return total, static(normed, scale, FP8), by_token(silu(x) * residual, scale, FP8)

    nodes = lower_on(catalogue_profile("h200"), step, *inputs(torch.bfloat16))
    assert [n.kernel for n in nodes] == ["triton_add_rms_norm_quantise", "triton_silu_mul_quantise"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_pass_after_the_other_gives_what_eager_does(dynamic: bool) -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return by_token(silu(x) * residual, scale, torch.int8)

    assert_equivalent(
        step, *inputs(torch.float32), matches={"fuse_silu_mul": 1, "fuse_silu_mul_quantise": 1}, dynamic=dynamic
    )
