"""Attention written out: products, scale, cap, mask, softmax and sum in many hands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import Adapted, problem, run
from torch import Tensor

PAGED = torch.ops.tcport.paged_attention.default
Written = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From q ``[B, Hq, S, D]``, K and V ``[B, Hkv, L, D]`` and visibility ``[B, L]`` to ``[B, Hq, S, D]``."""


def attend(written: Written) -> Callable[..., Tensor]:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        return written(q, key, value, torch.arange(key.shape[2]) < lens[:, None])

    return model


def options(adapted: Adapted) -> dict[str, Any]:
    (node,) = adapted.calls(PAGED)
    return {name: True if isinstance(value, torch.fx.Node) else value for name, value in node.kwargs.items()}


def repeat_kv(hidden: Tensor, times: int) -> Tensor:
    """The usual helper of decoder models."""
    batch, heads, length, dim = hidden.shape
    if times == 1:
        return hidden
    return hidden[:, :, None, :, :].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


def eager_decoder(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    key, value = repeat_kv(key, 3), repeat_kv(value, 3)
    weights = torch.matmul(q, key.transpose(2, 3)) * q.shape[-1] ** -0.5
    bias = torch.where(visible[:, None, None, :], 0.0, torch.finfo(q.dtype).min)
    weights = weights + bias
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, value)


def small_model(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(3, dim=1) for x in (key, value))
    att = (q @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
    att = att.masked_fill(visible[:, None, None, :] == 0, float("-inf"))
    return F.softmax(att, dim=-1) @ value


def scaled_query(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    q = q * 0.25
    scores = torch.einsum("bhsd,bhld->bhsl", q, key.repeat_interleave(3, 1))
    scores = torch.where(visible[:, None, None], scores, torch.tensor(float("-inf")))
    return torch.einsum("bhsl,bhld->bhsd", scores.softmax(-1), value.repeat_interleave(3, 1))


def divided_by_root(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = q @ key.repeat_interleave(3, 1).mT / math.sqrt(16)
    scores.masked_fill_(~visible[:, None, None], -1e9)
    return torch.softmax(scores, dim=3) @ value.repeat_interleave(3, 1)


def divided_by_constant_tensor(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = q @ repeat_kv(key, 3).transpose(-1, -2) / torch.tensor(4.0)
    return scores.masked_fill(visible.logical_not()[:, None, None], -math.inf).softmax(dim=-1) @ repeat_kv(value, 3)


def grouped_matmul(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    batch, heads, tokens, dim = q.shape
    grouped = q.reshape(batch, 2, 3, tokens, dim)
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) / 4
    scores = scores + torch.zeros(visible.shape).masked_fill(~visible, -math.inf)[:, None, None, None]
    return torch.matmul(scores.softmax(-1), value.unsqueeze(2)).reshape(batch, heads, tokens, dim)


def grouped_rows(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    batch, heads, tokens, dim = q.shape
    rows = q.reshape(batch, 2, 3 * tokens, dim)  # query heads of one KV head as rows of one product
    scores = (rows @ key.mT * 0.25).masked_fill(~visible[:, None, None], -math.inf)
    return (scores.softmax(-1) @ value).reshape(batch, heads, tokens, dim)


def merged_bmm(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    batch, heads, tokens, dim = q.shape
    key, value = (repeat_kv(x, 3).reshape(batch * heads, -1, dim) for x in (key, value))
    scores = torch.bmm(q.reshape(batch * heads, tokens, dim), key.transpose(1, 2)) * 0.25
    hidden = ~visible[:, None].expand(batch, heads, -1).reshape(batch * heads, 1, -1)
    return torch.bmm(scores.masked_fill(hidden, -math.inf).softmax(-1), value).view(batch, heads, tokens, dim)


def baddbmm_scores(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    batch, heads, tokens, dim = q.shape
    key, value = (repeat_kv(x, 3).flatten(0, 1) for x in (key, value))
    empty = torch.empty(batch * heads, tokens, key.shape[1])
    scores = torch.baddbmm(empty, q.flatten(0, 1), key.mT, beta=0) * 0.25
    scores = scores.view(batch, heads, tokens, -1).masked_fill(~visible[:, None, None], -math.inf)
    return torch.bmm(scores.softmax(-1).flatten(0, 1), value).view(batch, heads, tokens, dim)


def product_and_sum(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    key, value = repeat_kv(key, 3), repeat_kv(value, 3)
    scores = (q * key).sum(-1, keepdim=True).transpose(-1, -2) * 0.25  # one query token: [B, H, 1, L]
    weights = scores.masked_fill(~visible[:, None, None], -math.inf).softmax(-1)
    return (weights.transpose(-1, -2) * value).sum(dim=-2, keepdim=True)


def softmax_by_hand(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = (q @ repeat_kv(key, 3).mT * 0.25).masked_fill(~visible[:, None, None], -math.inf)
    exponent = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponent / exponent.sum(-1, keepdim=True) @ repeat_kv(value, 3)


def single_precision_throughout(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = q.float() @ repeat_kv(key, 3).float().mT * 0.25
    scores = scores.masked_fill(~visible[:, None, None], -math.inf)
    return (scores.softmax(-1) @ repeat_kv(value, 3).float()).to(q.dtype)


def nan_safe(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = (q @ repeat_kv(key, 3).mT * 0.25).masked_fill(~visible[:, None, None], -math.inf)
    return torch.nan_to_num(scores.softmax(-1), nan=0.0) @ repeat_kv(value, 3)


def values_first(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = (repeat_kv(key, 3) @ q.mT * 0.25).masked_fill(~visible[:, None, :, None], -math.inf)  # [B, H, L, S]
    return (repeat_kv(value, 3).mT @ scores.softmax(2)).mT


WRITTEN: list[Written] = [
    eager_decoder,
    small_model,
    scaled_query,
    divided_by_root,
    divided_by_constant_tensor,
    grouped_matmul,
    grouped_rows,
    merged_bmm,
    baddbmm_scores,
    product_and_sum,
    softmax_by_hand,
    single_precision_throughout,
    nan_safe,
    values_first,
]


@pytest.mark.parametrize("written", WRITTEN, ids=lambda w: w.__name__)
def test_decode(written: Written) -> None:
    adapted = run(attend(written), *problem().args)
    assert adapted.kinds == ["paged_attention:softmax"], adapted.report
    assert not adapted.rules
    assert set(options(adapted)) <= {"scale"}


@pytest.mark.parametrize("written", [eager_decoder, small_model, grouped_matmul, merged_bmm])
def test_decode_with_symbolic_sizes(written: Written) -> None:
    adapted = run(attend(written), *problem().args, dynamic=True)
    assert adapted.kinds == ["paged_attention:softmax"], adapted.report


@pytest.mark.parametrize("written", [eager_decoder, single_precision_throughout])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(written: Written, dtype: torch.dtype) -> None:
    adapted = run(attend(written), *problem(dtype=dtype).args)
    assert adapted.kinds == ["paged_attention:softmax"], adapted.report


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_query_that_was_rounded_stays_rounded(narrow: torch.dtype) -> None:
    """The query is taken from before its casts only where they kept its value."""

    def model(q: Tensor, *others: Tensor) -> Tensor:
        return attend(eager_decoder)(q.to(narrow).float(), *others)

    adapted = run(model, *problem().args)
    assert adapted.kinds == ["paged_attention:softmax"], adapted.report


def test_dense_einsum_over_pages() -> None:
    """The key is never flattened: scores are [.., columns, page], and the softmax alone sees one dimension."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        batch, heads, _, dim = q.shape
        grouped = q.view(batch, 2, heads // 2, dim)
        scores = torch.einsum("bhgd,bmphd->bhgmp", grouped, k_cache[table]) * dim**-0.5
        shape = scores.shape
        visible = torch.arange(40) < lens[:, None]
        weights = scores.flatten(3).masked_fill(~visible[:, None, None], -math.inf).softmax(-1).view(shape)
        return torch.einsum("bhgmp,bmphd->bhgd", weights, v_cache[table]).reshape(q.shape)

    adapted = run(model, *problem().args)
    assert adapted.kinds == ["paged_attention:softmax"], adapted.report


def test_einsum_with_heads_last() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2) for cache in (k_cache, v_cache))  # [B, L, H, D]
        query = q.squeeze(2).unflatten(1, (2, 3))
        scores = torch.einsum("b k g d, b l k d -> b k g l", query, key) / 4
        scores = scores.masked_fill(torch.arange(40) >= lens[:, None, None, None], -math.inf)
        return torch.einsum("bkgl,blkd->bkgd", scores.softmax(-1), value).flatten(1, 2)

    adapted = run(model, *problem().args)
    assert adapted.kinds == ["paged_attention:softmax"], adapted.report


def test_softcap() -> None:
    def capped(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        scores = q @ repeat_kv(key, 3).mT * 0.25
        scores = torch.tanh(scores / 2.5) * 2.5
        return scores.masked_fill(~visible[:, None, None], -math.inf).softmax(-1) @ repeat_kv(value, 3)

    adapted = run(attend(capped), *problem().args)
    assert options(adapted) == {"scale": pytest.approx(0.25), "softcap": 2.5}


def test_softcap_in_three_steps() -> None:
    def capped(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        scores = torch.matmul(q, repeat_kv(key, 3).transpose(2, 3)) * 0.3
        scores = scores / 5.0
        scores = torch.tanh(scores)
        scores = scores * 5.0
        scores = scores + torch.where(visible, 0.0, -1e9)[:, None, None]
        return F.softmax(scores, dim=-1) @ repeat_kv(value, 3)

    adapted = run(attend(capped), *problem().args)
    assert options(adapted) == {"scale": pytest.approx(0.3), "softcap": 5.0}


def test_alibi() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slopes: Tensor) -> Tensor:
        key, value = (repeat_kv(cache[table].flatten(1, 2).transpose(1, 2), 3) for cache in (k_cache, v_cache))
        positions = torch.arange(40)
        scores = q @ key.mT * 0.25 + slopes[None, :, None, None] * positions.float()
        return scores.masked_fill(positions >= lens[:, None, None, None], -math.inf).softmax(-1) @ value

    slopes = 2.0 ** -torch.arange(1.0, 7.0)
    adapted = run(model, *problem().args, slopes)
    assert options(adapted) == {"scale": 0.25, "alibi_slopes": True}, adapted.report


def test_sinks() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, sinks: Tensor) -> Tensor:
        key, value = (repeat_kv(cache[table].flatten(1, 2).transpose(1, 2), 3) for cache in (k_cache, v_cache))
        scores = q @ key.mT * 0.25
        scores = scores + torch.where(torch.arange(40) < lens[:, None], 0.0, -math.inf)[:, None, None]
        sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        both = torch.cat([scores, sink], dim=-1)
        both = both - both.max(dim=-1, keepdim=True).values
        return F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1] @ value

    adapted = run(model, *problem().args, torch.tensor([0.3, -1.0, 2.0, 0.0, 5.0, -4.0]))
    assert options(adapted) == {"scale": 0.25, "sinks": True}, adapted.report


SHIFTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a number": lambda scores, lens, slopes: scores + 1.5,
    "a number of the sequence": lambda scores, lens, slopes: scores - 0.1 * lens[:, None, None, None],
    "the row's maximum": lambda scores, lens, slopes: scores - scores.amax(-1, keepdim=True),
    "ALiBi from position 0": lambda scores, lens, slopes: scores + slopes * torch.arange(40).float(),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_a_row_moved_without_its_sink_is_left_alone(name: str) -> None:
    """softmax([logits + c, sink]) is not softmax([logits, sink])."""

    def model(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, sinks: Tensor, slopes: Tensor
    ) -> Tensor:
        key, value = (repeat_kv(cache[table].flatten(1, 2).transpose(1, 2), 3) for cache in (k_cache, v_cache))
        scores = SHIFTS[name](q @ key.mT * 0.25, lens, slopes)
        scores = scores.masked_fill(torch.arange(40) >= lens[:, None, None, None], -math.inf)
        both = torch.cat([scores, sinks.expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
        return both.softmax(-1)[..., :-1] @ value

    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0, 5.0, -4.0]).reshape(1, -1, 1, 1)
    adapted = run(model, *problem().args, sinks, 2.0 ** -torch.arange(1.0, 7.0).reshape(1, -1, 1, 1))
    assert adapted.calls(PAGED) == []
    assert adapted.rules == ["logits"]


def test_logits_moved_before_they_are_capped_are_left_alone() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (repeat_kv(cache[table].flatten(1, 2).transpose(1, 2), 3) for cache in (k_cache, v_cache))
        scores = 5.0 * torch.tanh((q @ key.mT * 0.25 + 2.0) / 5.0)
        return scores.masked_fill(torch.arange(40) >= lens[:, None, None, None], -math.inf).softmax(-1) @ value

    adapted = run(model, *problem().args)
    assert adapted.calls(PAGED) == []
    assert adapted.rules == ["logits"]


def test_causal_prefill_written_out() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (repeat_kv(cache[table].flatten(1, 2).transpose(1, 2), 3) for cache in (k_cache, v_cache))
        query = (lens - q.shape[2])[:, None] + torch.arange(q.shape[2])
        scores = q @ key.mT * 0.25
        scores = scores.masked_fill((torch.arange(40) > query[..., None])[:, None], -math.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    adapted = run(model, *problem(tokens=5).args)
    assert options(adapted) == {"scale": 0.25}
    (node,) = adapted.calls(PAGED)
    assert len(node.args) == 6


def test_one_sequence_without_a_batch_dimension() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, length: Tensor) -> Tensor:
        key, value = (cache[pages].flatten(0, 1) for cache in (k_cache, v_cache))  # [L, H, D]
        scores = torch.einsum("shd,lhd->hsl", q, key.repeat_interleave(3, 1)) * 0.25
        positions = torch.arange(key.shape[0])
        query = length - q.shape[0] + torch.arange(q.shape[0])
        weights = scores.masked_fill(positions > query[:, None], -math.inf).softmax(-1)
        return torch.einsum("hsl,lhd->shd", weights, value.repeat_interleave(3, 1))

    given = problem(batch=1, tokens=4)
    adapted = run(model, given.q[0].transpose(0, 1), given.k_cache, given.v_cache, given.table[0], given.lens[0])
    assert adapted.kinds == ["paged_attention:softmax"], adapted.report
