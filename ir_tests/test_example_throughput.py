"""What examples/throughput.py measures is a decode step as serving has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generate import LayoutChoice
from kv_pool import SCRATCH_PAGE
from llama import Llama, LlamaConfig
from throughput import attach_caches, medians, step_arguments

CONFIG = LlamaConfig(
    vocab_size=64, width=32, mlp_width=48, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)


@pytest.mark.parametrize("layout", LayoutChoice)
def test_a_step_writes_and_reads_the_pages_of_its_sequences(layout: LayoutChoice) -> None:
    model: Any = Llama(CONFIG).requires_grad_(False).eval()
    attach_caches(model, 3 * 42, 1, page_size=4, layout=layout)
    tokens, positions, table = step_arguments(model, 3, 42)
    assert tokens.shape == (3,)
    assert positions.tolist() == [41] * 3
    assert table.shape == (3, 11)
    assert len(set(table.flatten().tolist()) - {SCRATCH_PAGE}) == 33

    k_cache = model.layers[0].attention.k_cache
    assert k_cache.shape[1:] == (4, 2, 8)
    assert k_cache.is_contiguous() == (layout is LayoutChoice.page_major)
    before = k_cache.clone()
    calls = []

    def step(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(arguments)
        return model.decode(*arguments)

    assert set(medians({"eager": step}, (tokens, positions, table), rounds=3)) == {"eager"}
    assert len(calls) == 3
    written = (k_cache != before).flatten(2).any(-1).nonzero().tolist()
    assert sorted(written) == sorted([page, 41 % 4] for page in table[:, 10].tolist())
