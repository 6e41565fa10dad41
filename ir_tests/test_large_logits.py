"""Logits so large that they are rounded by much: weights are still relative to the largest, and 1 in all."""

from __future__ import annotations

import pytest
import torch
from attention_paths import COMPILED, EVERY_PATH, Path
from torch import Tensor

import tcport
from tcport.kernels import reference

PAGE, KEYS, DIM = 16, 200, 64


@pytest.fixture(params=[*EVERY_PATH, pytest.param(COMPILED, id="compiled")])
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def equal_logits(size: float, tokens: int) -> dict[str, Tensor]:
    """Queries of ``size`` on one sequence, whose keys are all the same."""
    torch.manual_seed(4)
    pages = -(-KEYS // PAGE)
    return {
        "query": torch.full((tokens, 4, DIM), size),
        "k_cache": torch.ones(pages, PAGE, 2, DIM),
        "v_cache": torch.randn(pages, PAGE, 2, DIM),
        "block_table": torch.randperm(pages).int()[None],
        "seq_lens": torch.tensor([KEYS]),
        **({} if tokens == 1 else {"cu_seqlens_q": torch.tensor([0, tokens])}),
    }


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e10, 1e30, -1e30])
def test_equal_logits_of_any_size_weigh_the_same(path: Path, size: float, tokens: int) -> None:
    given = equal_logits(size, tokens)
    out, lse = path.attention(**given)
    values = given["v_cache"][given["block_table"][0].long()].flatten(0, 1)[:KEYS].double()
    for token in range(tokens):
        seen = KEYS - tokens + token + 1
        mean = values[:seen].mean(0).repeat_interleave(2, dim=0)
        torch.testing.assert_close(out[token].double(), mean, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), torch.full_like(lse, size * DIM**0.5).double(), rtol=1e-5, atol=6)


@pytest.mark.parametrize("size", [0.0, 1e3, 1e15, 1e30, -1e30])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("merge", [tcport.merge_states, reference.merge_states])
def test_parts_of_equal_lse_weigh_the_same(merge: object, device: str, size: float) -> None:
    torch.manual_seed(5)
    a, b = torch.randn(2, 3, 4, 8, device=device)
    lse = torch.full((3, 4), size, device=device)
    out, merged = merge(a, lse, b, lse)
    torch.testing.assert_close(out, (a + b) / 2)
    torch.testing.assert_close(merged, lse + 0.6931472)
