"""Fusions between attention calls: SiLU-mul, residual sum + RMSNorm; their operators, and the graphs they match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tcport
from tcport.device.catalog import catalogue_profile
from tcport.kernels import layers
from tcport.lowering.agreement import check_numbers, check_results
from tcport.lowering.registry import rows
from tcport.testing import assert_equivalent, capture, lower_on, run_pass

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_the_definitions_on_numbers_worked_out_by_hand() -> None:
    gate, up = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([5.0, 2.0, 1.0])
    expected = torch.tensor([0.0, 2 * 0.7310585786, -2 * 0.1192029220])  # 1 / (1 + exp(-x)) at 1 and -2
    torch.testing.assert_close(layers.silu_mul(gate, up), expected)
    total, normed = layers.add_rms_norm(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 0.5]), 0.0
    )
    assert total.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(normed, torch.tensor([[3 / 12.5**0.5, 2 / 12.5**0.5]]))


def samples(op: str) -> Iterator[tuple[Any, ...]]:
    for dtype in (torch.float32, torch.float16):
        x = torch.linspace(-4, 4, 60, dtype=dtype)
        if op == "silu_mul":
            yield x.view(3, 20).chunk(2, -1)
            yield tuple(x.view(2, 2, 3, 5).transpose(1, 2))
        else:
            yield x.view(6, 10), x.flip(0).view(10, 6).t(), torch.linspace(0.5, 1, 10, dtype=dtype), 1e-5


@pytest.mark.parametrize("op", ["silu_mul", "add_rms_norm"])
def test_every_candidate_agrees_with_the_operator(op: str) -> None:
    """Shapes, strides and dtypes on every device of the catalogue; numbers where there is a device to run on."""
    for row in rows(f"tcport::{op}"):
        check_results(row, lambda: samples(op))
        ran = check_numbers(row, lambda: samples(op), (2e-3, 1e-5), "cpu")
        assert ran == (0 if row.name.startswith("triton") else len(list(samples(op))))


class Block(nn.Module):
    """The end of one layer and the start of the next, with the norm of torch or of transformers."""

    def __init__(self, norm: Callable[..., nn.Module], width: int = 16) -> None:
        super().__init__()
        self.norm, self.next_norm = norm(width, 1e-5), norm(width, 1e-6)
        self.gate_up, self.down = nn.Linear(width, 48, bias=False), nn.Linear(24, width, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=0.1, std=0.3)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        gate, up = self.gate_up(self.norm(residual)).chunk(2, -1)
        residual = self.down(silu(gate) * up) + residual
        return residual, self.next_norm(residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [nn.RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_of_torch_and_of_transformers(norm: Callable[..., nn.Module], dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        block = Block(norm).to(dtype)
        args = torch.randn(2, 3, 16, dtype=dtype), torch.randn(2, 3, 16, dtype=dtype)
        norms = 0 if dynamic and norm is LlamaRMSNorm else 2  # its epsilon is an input of the graph then
        matches = {"fuse_silu_mul": 1, "fuse_add_rms_norm": norms}
        report = assert_equivalent(block, *args, matches=matches, dynamic=dynamic)
    assert {p.name: p.notes for p in report.passes if p.name in matches} == dict.fromkeys(matches, ())


def test_compiled_the_results_are_those_of_eager() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        block, args = Block(nn.RMSNorm), (torch.randn(5, 16), torch.randn(5, 16))
        compiled = torch.compile(block, backend="tcport", fullgraph=True)
        torch.testing.assert_close(compiled(*args), block(*args), rtol=1e-5, atol=1e-5)
    report = tcport.last_report()
    assert report is not None
    assert [(n.op, n.kernel) for n in report.nodes] == [
        ("tcport::add_rms_norm", "torch_add_rms_norm"),
        ("tcport::silu_mul", "torch_silu_mul"),
        ("tcport::add_rms_norm", "torch_add_rms_norm"),
    ]


def test_a_gpu_gets_the_kernels() -> None:
    with torch.no_grad():
        nodes = lower_on(catalogue_profile("h200"), Block(nn.RMSNorm), torch.randn(5, 16), torch.randn(5, 16))
    assert [n.kernel for n in nodes] == ["triton_add_rms_norm", "triton_silu_mul", "triton_add_rms_norm"]
    assert all(n.chain[1].startswith("torch_") for n in nodes)


X, W = torch.randn(4, 6), torch.randn(6)


def wide_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, nn.functional.rms_norm(total, (4, 6), None, 1e-5)


def norm_used_inside(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    mean_square = total.pow(2).mean(-1, keepdim=True)
    return total, W * (total * torch.rsqrt(mean_square + 1e-5)), mean_square


def sum_with_a_factor(x: Tensor, residual: Tensor) -> Tensor:
    return nn.functional.rms_norm(torch.add(x, residual, alpha=2), (6,), W, 1e-5)


def broadcast_sum(x: Tensor, residual: Tensor) -> Tensor:
    return nn.functional.rms_norm(x + residual[0], (6,), W, 1e-5)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (wide_norm, ""),
        (norm_used_inside, "uses mean, which would no longer be computed"),
        (sum_with_a_factor, ""),
        (broadcast_sum, "replacement gives|another wildcard"),
    ],
)
def test_what_is_no_residual_norm_is_left(fn: Callable[..., object], said: str) -> None:
    graph = capture(fn, X, X.flip(0))
    report = run_pass("fuse_add_rms_norm", graph)
    assert report.matches == 0
    if said:
        assert any(part in " ".join(report.notes) for part in said.split("|")), report.notes
    assert_equivalent(fn, X, X.flip(0))


def test_a_gate_with_another_user_or_another_shape_is_left() -> None:
    report = run_pass("fuse_silu_mul", capture(lambda x, y: ((s := silu(x)) * y, s + 1), X, X), matches=0)
    assert "would no longer be computed" in report.notes[0]
    run_pass("fuse_silu_mul", capture(lambda x, y: silu(x) * y, X, W), matches=0)
    run_pass("fuse_silu_mul", capture(lambda x, y: silu(x) * y, X.t(), X.t()), matches=0)
