"""A sequence that grows, a batch that changes, a table that widens: how often the step is compiled (case A12)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tcport
from tcport.kernels import reference

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4


def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """A decode step as a model has it: the slot of the new token follows from table and length, on the device."""
    last = lens - 1
    page = table.gather(1, (last // PAGE)[:, None].long()).squeeze(1)
    tcport.kv_write(k, v, kc, vc, page * PAGE + last % PAGE)
    return tcport.paged_attention(q, kc, vc, table, lens)


class Sequences:
    """``count`` sequences of the same length, one page table row each."""

    def __init__(self, count: int, width: int, pages: int = 160) -> None:
        self.kc, self.vc = torch.zeros(pages, PAGE, KV_HEADS, DIM), torch.zeros(pages, PAGE, KV_HEADS, DIM)
        self.table = torch.randperm(pages)[: count * width].reshape(count, width).int()

    def arguments(self, batch: int, width: int, length: int) -> list[Tensor]:
        q, k, v = (torch.randn(batch, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return [q, k, v, self.kc, self.vc, self.table[:batch, :width].contiguous(), torch.full((batch,), length)]


def run(plan: list[tuple[int, int, int]], sequences: Sequences) -> int:
    """Run steps of (batch, width, length), each checked against the reference; the number of compiles."""
    compiled = torch.compile(step, backend="tcport", fullgraph=True)
    with tcport.history.collected() as report:
        for batch, width, length in plan:
            args = sequences.arguments(batch, width, length)
            out = compiled(*args)
            want, _ = reference.paged_attention(args[0], *args[3:])
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    return len(report.graphs)


def test_200_steps_across_page_boundaries() -> None:
    assert run([(2, 50, length) for length in range(1, 201)], Sequences(2, 50)) == 1


@pytest.mark.parametrize("batches", [(2, 3, 5, 4), (3, 2, 7, 2)])
def test_a_changing_batch(batches: tuple[int, ...]) -> None:
    assert run([(b, 8, 3 + 5 * i) for i, b in enumerate(batches)], Sequences(8, 8)) <= 2


def test_a_table_that_grows_every_16_steps() -> None:
    assert run([(2, 4 * (1 + length // 16), length) for length in range(1, 100)], Sequences(2, 28)) <= 2
