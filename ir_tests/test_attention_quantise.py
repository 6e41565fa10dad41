"""A quantise of what attention gives: Inductor makes one kernel of it, views included, that reads the result once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import tcport as tcport  # registers the backend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, scale: Tensor) -> Tensor:
    out, _ = torch.ops.tcport.paged_attention(query, k_cache, v_cache, table, lens)
    return out.view(query.shape[0], -1)


def fp8_by_tensor(*inputs: Tensor) -> Tensor:
    return (attend(*inputs).float() / inputs[-1]).clamp(-448, 448).to(torch.float8_e4m3fn)


def int8_by_token(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    out = attend(*inputs)
    scale = (out.abs().amax(-1, keepdim=True).float() / 127).clamp(min=1e-6)
    return (out.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def inputs(device: str) -> tuple[Tensor, ...]:
    """Two sequences of 40 keys, four query heads of 64."""
    rng = torch.Generator().manual_seed(0)
    query, caches = torch.randn(2, 4, 64, generator=rng), torch.randn(2, 6, 16, 2, 64, generator=rng)
    whole = torch.arange(6, dtype=torch.int32).view(2, 3), torch.full((2,), 40, dtype=torch.int32), torch.tensor(0.02)
    return tuple(t.to(device) for t in (query.bfloat16(), *caches.bfloat16().unbind(), *whole))


def generated(run: Callable[..., Any], device: str) -> list[str]:
    """Names of the kernels in a function's generated code."""
    torch.compiler.reset()
    options: dict[str, Any] = {"kernel": "cpp_attention"} if device == "cpu" else {}
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(run, backend="tcport", options=options), *inputs(device))
    return re.findall(r"^(\w+) = async_compile\.\w+\(", "\n".join(codes), re.MULTILINE)


@pytest.mark.parametrize("device", DEVICES)
def test_a_quantise_of_attention_is_one_kernel_of_inductor(device: str) -> None:
    alone = generated(attend, device)
    for quantise in (fp8_by_tensor, int8_by_token):
        more = generated(quantise, device)
        assert len(more) == len(alone) + 1, (alone, more)
