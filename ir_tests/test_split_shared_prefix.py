"""Pages that a graph gives to all sequences are read once: what is split, what is left, and that results stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport.testing import assert_equivalent, capture, run_pass

PAGE, HEADS, KV_HEADS, DIM, SEQUENCES = 128, 4, 2, 16, 3
SHARED = 4
"""Pages of the prefix: 512 keys."""


def arguments(dtype: torch.dtype = torch.float32, index: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    """Query, caches, prefix ``[SHARED]``, own pages ``[3, 2]`` and own lengths, of which one is 0 and one a page."""
    rng = torch.Generator().manual_seed(2)
    pages = torch.randperm(SHARED + 2 * SEQUENCES + 1, generator=rng).to(index)
    caches = (torch.randn(len(pages), PAGE, KV_HEADS, DIM, generator=rng).to(dtype) for _ in "kv")
    query = torch.randn(SEQUENCES, HEADS, DIM, generator=rng).to(dtype)
    own = pages[SHARED : SHARED + 2 * SEQUENCES].view(SEQUENCES, 2)
    return query, *caches, pages[:SHARED], own, torch.tensor([130, 0, 128], dtype=index)


def attend(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor, **options: Any) -> Any:
    """``own`` pages and keys come after those of the prefix."""
    table = torch.cat((prefix[None].expand(own.shape[0], -1), own), 1)
    return tcport.paged_attention(query, k, v, table, lens + prefix.shape[0] * k.shape[1], **options)


def repeated_and_cast(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor) -> Any:
    table = torch.cat((prefix.repeat(own.shape[0], 1), own), -1).int()
    return tcport.paged_attention(query, k, v, table, (SHARED * PAGE + lens).int(), softcap=20.0)


def with_lse(*args: Tensor) -> Any:
    return attend(*args, return_lse=True)


def with_sinks(*args: Tensor) -> Any:
    return attend(*args, sinks=torch.linspace(-1, 1, HEADS))


def after_a_write(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor) -> Any:
    """As serving does: the token's key goes where its sequence ends; of the empty one, nowhere."""
    page = own.gather(1, ((lens - 1).clamp(min=0) // PAGE)[:, None].long())[:, 0]
    slots = torch.where(lens > 0, page * PAGE + (lens - 1) % PAGE, -1)
    tcport.kv_write(query[:, :KV_HEADS] * 2, query[:, KV_HEADS:], k, v, slots)
    return attend(query, k, v, prefix, own, lens)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("model", [attend, repeated_and_cast, with_lse, with_sinks, after_a_write])
def test_a_prefix_that_the_graph_shares_is_read_on_its_own(model: Callable[..., Any], index: torch.dtype) -> None:
    report = assert_equivalent(model, *arguments(index=index), matches={"split_shared_prefix": 1})
    (note,) = next(p.notes for p in report.passes if p.name == "split_shared_prefix")
    assert note == "512 keys that 3 sequences share are read once"


def test_it_is_what_reading_the_prefix_for_each_gives_in_fp64() -> None:
    query, k, v, prefix, own, lens = arguments()
    compiled = torch.compile(attend, backend="tcport", fullgraph=True)
    actual = compiled(query, k, v, prefix, own, lens)
    for row in range(SEQUENCES):
        pages = torch.cat((prefix, own[row]))
        keys, values = (c[pages].flatten(0, 1)[: SHARED * PAGE + int(lens[row])].double() for c in (k, v))
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (keys, values))
        weights = (torch.einsum("hd,nhd->hn", query[row].double(), keys) / DIM**0.5).softmax(-1)
        expected = torch.einsum("hn,nhd->hd", weights, values)
        torch.testing.assert_close(actual[row].double(), expected, rtol=1e-5, atol=1e-6)
    report = tcport.last_report()
    assert report is not None
    assert [node.op for node in report.nodes] == ["paged_attention", "paged_attention", "merge_states"]


def test_a_row_of_no_keys_still_gets_zeros() -> None:
    query, k, v, prefix, own, _ = arguments()
    lens = torch.tensor([5, -SHARED * PAGE, 7], dtype=torch.int32)
    out = torch.compile(attend, backend="tcport", fullgraph=True)(query, k, v, prefix, own, lens)
    assert torch.equal(out[1], torch.zeros(HEADS, DIM))
    torch.testing.assert_close(out, attend(query, k, v, prefix, own, lens), rtol=1e-5, atol=1e-6)


def own_first(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor) -> Any:
    table = torch.cat((own, prefix[None].expand(own.shape[0], -1)), 1)
    return tcport.paged_attention(query, k, v, table, lens + SHARED * PAGE)


def pages_of_each(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor) -> Any:
    table = torch.cat((prefix[:SEQUENCES, None].expand(-1, SHARED), own), 1)
    return tcport.paged_attention(query, k, v, table, lens + SHARED * PAGE)


@pytest.mark.parametrize("model", [own_first, pages_of_each])
def test_other_tables_do_not_look_like_it(model: Callable[..., Any]) -> None:
    assert run_pass("split_shared_prefix", capture(model, *arguments()), matches=0).notes == ()


def unknown_lengths(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor) -> Any:
    table = torch.cat((prefix[None].expand(own.shape[0], -1), own), 1)
    return tcport.paged_attention(query, k, v, table, lens)


def short_of_the_prefix(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor) -> Any:
    table = torch.cat((prefix[None].expand(own.shape[0], -1), own), 1)
    return tcport.paged_attention(query, k, v, table, lens + SHARED * PAGE - 1)


def short_prefix(query: Tensor, k: Tensor, v: Tensor, prefix: Tensor, own: Tensor, lens: Tensor) -> Any:
    return attend(query, k, v, prefix[:3], own, lens)


def with_a_window(*args: Tensor) -> Any:
    return attend(*args, window=40)


def in_every_batch_alike(*args: Tensor) -> Any:
    return attend(*args, batch_invariant=True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (unknown_lengths, "its lengths are not known to cover the shared pages"),
        (short_of_the_prefix, "its lengths are not known to cover the shared pages"),
        (short_prefix, "not known to hold 512 keys"),
        (with_a_window, "its window differs from token to token"),
        (in_every_batch_alike, "the same in every batch"),
    ],
)
def test_what_is_left_is_left_with_the_reason(model: Callable[..., Any], said: str) -> None:
    report = assert_equivalent(model, *arguments(), matches={"split_shared_prefix": 0})
    (note,) = next(p.notes for p in report.passes if p.name == "split_shared_prefix")
    assert said in note
