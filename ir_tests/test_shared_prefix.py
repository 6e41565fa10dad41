"""Shared-prefix attention equals the plain result on the same batch, in fp64 from the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport.errors import ArgumentError
from tcport.kernels import reference

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 40, 6, 2, 16


def batch(shared_pages: int, own: list[int], q_lens: list[int] | None = None) -> dict[str, Any]:
    """Sequences of ``own`` keys behind ``shared_pages`` common pages; own 0 stands for a padding row of length 0."""
    width = shared_pages + 4
    order = torch.randperm(PAGES)
    table = torch.full((len(own), width), 10**6)
    lens = torch.zeros(len(own), dtype=torch.int64)
    free = shared_pages
    for row, keys in enumerate(own):
        if keys:
            pages = -(-keys // PAGE)
            table[row, :shared_pages] = order[:shared_pages]
            table[row, shared_pages : shared_pages + pages] = order[free : free + pages]
            lens[row], free = shared_pages * PAGE + keys, free + pages
    tokens = len(own) if q_lens is None else sum(q_lens)
    cu = None if q_lens is None else torch.tensor([0, *q_lens]).cumsum(0).int()
    caches = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM)
    query = torch.randn(tokens, HEADS, DIM)
    return {
        "query": query, "k_cache": caches[0], "v_cache": caches[1], "block_table": table, "seq_lens": lens,
        "cu_seqlens_q": cu,
    }  # fmt: skip


CASES = [
    batch(3, [5, 1, 16, 9]),
    batch(1, [1]),
    batch(0, [5, 3]),
    batch(2, [0, 7, 0]),
    batch(2, [0, 0]),
    batch(2, [6, 3, 8], [4, 1, 8]),
    batch(2, [6, 0, 8], [4, 0, 2]),
    batch(2, [0, 5], [3, 2]),
]
SHARED = [3, 1, 0, 2, 2, 2, 2, 2]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"softcap": 5.0, "scale": 0.3},
    {"sinks": torch.randn(HEADS)},
    {"k_scale": torch.tensor(0.5), "v_scale": torch.rand(KV_HEADS) + 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_the_plain_result(case: int, options: dict[str, Any]) -> None:
    want, want_lse = reference.paged_attention(**CASES[case], **options, compute_dtype=torch.float64)
    out, lse = tcport.shared_prefix_attention(**CASES[case], **options, shared_pages=SHARED[case], return_lse=True)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_compiled_too() -> None:
    def attend(query: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Any:
        return tcport.shared_prefix_attention(query, k, v, table, lens, shared_pages=3)

    arguments = [value for value in CASES[0].values() if value is not None]
    want, _ = reference.paged_attention(**CASES[0])
    got = torch.compile(attend, backend="tcport", fullgraph=True)(*arguments)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared_pages", [-1, 8])
def test_more_pages_than_the_table_has_is_refused(shared_pages: int) -> None:
    with pytest.raises(ArgumentError, match="block_table has 7 columns"):
        tcport.shared_prefix_attention(**CASES[0], shared_pages=shared_pages)
