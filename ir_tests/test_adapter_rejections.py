"""Near misses: what looks like paged attention and is not, each with the rule it breaks and a word of the reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import adapt_only, problem, run
from torch import Tensor

from tcport.adapter import RULES

GIVEN = problem()
Q, K_CACHE, V_CACHE, TABLE, LENS = GIVEN.args
RANDOM = torch.Generator().manual_seed(9)


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table].flatten(1, 2).transpose(1, 2)


def grouped(cache: Tensor, table: Tensor) -> Tensor:
    return gathered(cache, table).repeat_interleave(3, 1)


def visible(lens: Tensor, keys: int = 40) -> Tensor:
    return (torch.arange(keys) < lens[:, None])[:, None, None]


def sdpa(q: Tensor, key: Tensor, value: Tensor, lens: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, key, value, visible(lens), enable_gqa=True, **options)


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A model that must be left alone.

    Attributes:
        rule, word: the rule it breaks and a word in the reason.
        model: the model; args: its arguments.
        random: whether its result is random, so that only the graph can be compared.
    """

    rule: str
    word: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    random: bool = False


CASES: list[NearMiss] = []


def near_miss(rule: str, word: str, *args: Any, random: bool = False) -> Callable[[Callable[..., Any]], Any]:
    def add(model: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(NearMiss(rule, word, model, args or GIVEN.args, random))
        return model

    return add


# K and V are no rows of a paged cache.


@near_miss("not-paged", "without a block table", Q, K_CACHE[:3].transpose(1, 2), V_CACHE[:3].transpose(1, 2))
def dense_attention(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, key, value, enable_gqa=True)


@near_miss("not-paged", "without a block table")
def rows_of_a_static_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    key, value = (c[:3].transpose(1, 2) for c in (k_cache, v_cache))
    mask = visible(lens, 8) | (torch.arange(8) == 0)
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


@near_miss("not-paged", "made by", *GIVEN.args, GIVEN.k.transpose(1, 2))
def new_key_appended_to_the_gather(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, k: Tensor
) -> Tensor:
    key = torch.cat([gathered(k_cache, table)[:, :, :-1], k], 2)
    return sdpa(q, key, gathered(v_cache, table), lens)


@near_miss("not-paged", "changed in place by", *GIVEN.args, GIVEN.k[:, 0])
def new_key_written_into_the_gather(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, k: Tensor
) -> Tensor:
    key = gathered(k_cache, table)
    key[torch.arange(3), :, lens - 1] = k
    return sdpa(q, key, gathered(v_cache, table), lens)


@near_miss("not-paged", "made by", *GIVEN.args, torch.randn(16, 16, generator=RANDOM))
def projected_after_the_gather(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, weight: Tensor
) -> Tensor:
    return sdpa(q, gathered(k_cache, table) @ weight, gathered(v_cache, table), lens)


@near_miss("layout", "cos", *GIVEN.args, torch.randn(40, 16, generator=RANDOM))
def rotated_after_the_gather(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, cos: Tensor
) -> Tensor:
    key = gathered(k_cache, table)
    return sdpa(q, key * cos.expand_as(key).contiguous(), gathered(v_cache, table), lens)


@near_miss("layout", "gain", *GIVEN.args, torch.randn(16, generator=RANDOM))
def scaled_per_dim_after_the_gather(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, gain: Tensor
) -> Tensor:
    return sdpa(q, gathered(k_cache, table) * gain, gathered(v_cache, table), lens)


@near_miss("layout", "K is read at")
def offsets_from_a_tensor(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    positions = torch.arange(40)
    rows = table.repeat_interleave(8, 1)
    offsets = (positions[None] + lens[:, None]) % 8  # each sequence begins somewhere else in its page
    key, value = (c[rows, offsets].transpose(1, 2) for c in (k_cache, v_cache))
    return sdpa(q, key, value, lens)


# Gathered, but not as the canonical operator gathers.


@near_miss("tables-differ", "V in page", *GIVEN.args, TABLE.flip(1))
def different_tables(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, other: Tensor) -> Tensor:
    return sdpa(q, gathered(k_cache, table), gathered(v_cache, other), lens)


@near_miss("tables-differ", "V in page")
def table_changed_between_the_gathers(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    key = gathered(k_cache, table)
    table[:, 0] = 0
    return sdpa(q, key, gathered(v_cache, table), lens)


@near_miss("layout", "no view")
def tables_of_other_sequences(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    return sdpa(q, gathered(k_cache, table), gathered(v_cache, (table + 1) % 18), lens)


@near_miss("layout", "position")
def first_key_skipped(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    key, value = gathered(k_cache, table)[:, :, 1:], gathered(v_cache, table)[:, :, 1:]
    mask = visible(lens, 39) | (torch.arange(39) == 0)
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


@near_miss("layout", "position")
def last_pages_only(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    key, value = gathered(k_cache, table[:, -2:]), gathered(v_cache, table[:, -2:])
    mask = visible(lens, 16) | (torch.arange(16) == 0)
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


@near_miss("layout", "table")
def keys_in_another_order(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    # all first slots, then all second slots: position j is slot j // 5 of page j % 5
    key, value = (c[table].transpose(1, 2).flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
    return sdpa(q, key, value, lens)


@near_miss("tables-differ", "V in page")
def value_in_another_order(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    value = v_cache[table].transpose(1, 2).flatten(1, 2).transpose(1, 2)
    return sdpa(q, gathered(k_cache, table), value, lens)


@near_miss("not-paged", "V is made by")
def key_heads_reversed(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    return sdpa(q, gathered(k_cache, table), gathered(v_cache, table)[:, [1, 0]], lens)


# Masks.


@near_miss("mask", "between heads")
def mask_per_head(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    window = torch.arange(1, 7)[:, None, None]
    positions = torch.arange(40)
    mask = (positions < lens[:, None, None, None]) & (positions >= lens[:, None, None, None] - window)
    return F.scaled_dot_product_attention(q, gathered(k_cache, table), gathered(v_cache, table), mask, enable_gqa=True)


@near_miss("mask", "known to hold only 0 and -inf", *GIVEN.args, torch.randn(3, 1, 1, 40, generator=RANDOM))
def float_mask_from_outside(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, bias: Tensor
) -> Tensor:
    return F.scaled_dot_product_attention(q, gathered(k_cache, table), gathered(v_cache, table), bias, enable_gqa=True)


@near_miss("mask", "known to hold only 0 and -inf")
def mask_that_only_dims(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    bias = torch.where(visible(lens), 0.0, -3.0)
    return F.scaled_dot_product_attention(q, gathered(k_cache, table), gathered(v_cache, table), bias, enable_gqa=True)


@near_miss("mask", "known to hold only 0 and -inf")
def mask_that_favours(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    bias = torch.where(visible(lens), 1.0, 0.0)
    return F.scaled_dot_product_attention(q, gathered(k_cache, table), gathered(v_cache, table), bias, enable_gqa=True)


@near_miss("mask", "does not hide")
def filled_with_zero(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), 0.0)
    return scores.softmax(-1) @ grouped(v_cache, table)


@near_miss("mask", "neither", *GIVEN.args, torch.randn(6, 1, 40, generator=RANDOM))
def relative_position_bias(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, bias: Tensor
) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT + bias).masked_fill(~visible(lens), -math.inf)
    return scores.softmax(-1) @ grouped(v_cache, table)


@near_miss("logits", "before they are scaled")
def masked_before_the_scale(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -1e4) * 0.001
    return scores.softmax(-1) @ grouped(v_cache, table)


@near_miss("logits", "before they are scaled or capped")
def masked_inside_the_cap(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    return (torch.tanh(scores / 5) * 5).softmax(-1) @ grouped(v_cache, table)


@near_miss("mask", "hides every key")
def nothing_visible(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, 1, 40, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, gathered(k_cache, table), gathered(v_cache, table), mask, enable_gqa=True)


# Logits, weights, sums.


@near_miss("scale", "by a tensor", *GIVEN.args, torch.rand(6, 1, 1, generator=RANDOM))
def learned_scale(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, scale: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT * scale).masked_fill(~visible(lens), -math.inf)
    return scores.softmax(-1) @ grouped(v_cache, table)


@near_miss("scale", "divided by a tensor", *GIVEN.args, torch.tensor(2.0))
def scale_from_outside(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, scale: Tensor
) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT / scale).masked_fill(~visible(lens), -math.inf)
    return scores.softmax(-1) @ grouped(v_cache, table)


@near_miss("logits", "relu")
def relu_on_the_logits(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = F.relu(q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    return scores.softmax(-1) @ grouped(v_cache, table)


@near_miss("logits", "clamp")
def clamped_logits(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).clamp(-1, 1).masked_fill(~visible(lens), -math.inf)
    return scores.softmax(-1) @ grouped(v_cache, table)


@near_miss("softmax", "another dimension")
def softmax_over_heads(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -1e9)
    return scores.softmax(1) @ grouped(v_cache, table)


@near_miss("softmax", "sums over")
def part_of_the_weights(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    return scores.softmax(-1)[..., :24] @ grouped(v_cache, table)[:, :, :24]


@near_miss("softmax", "after the softmax", *GIVEN.args, torch.rand(6, 1, 1, generator=RANDOM))
def head_gate_on_the_weights(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, gate: Tensor
) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    return (scores.softmax(-1) * gate) @ grouped(v_cache, table)


@near_miss("softmax", "after the softmax")
def masked_after_the_softmax(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    weights = (q @ grouped(k_cache, table).mT).softmax(-1)
    return weights.masked_fill(~visible(lens), 0.0) @ grouped(v_cache, table)


@near_miss("dropout", "dropout_p", random=True)
def dropout_in_sdpa(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    return sdpa(q, gathered(k_cache, table), gathered(v_cache, table), lens, dropout_p=0.3)


@near_miss("dropout", "dropout", random=True)
def dropout_written_out(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    return F.dropout(scores.softmax(-1), 0.3, training=True) @ grouped(v_cache, table)


# Dtypes.


@near_miss("dtype", "rounded", Q.half(), *GIVEN.args[1:])
def keys_rounded(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    return sdpa(q, gathered(k_cache, table).half(), gathered(v_cache, table).half(), lens)


@near_miss("dtype", "round Q", Q, K_CACHE.bfloat16(), V_CACHE.bfloat16(), TABLE, LENS)
def query_more_precise_than_the_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    return sdpa(q, gathered(k_cache, table).float(), gathered(v_cache, table).float(), lens)


@near_miss("dtype", "round it", Q.bfloat16(), K_CACHE.bfloat16(), V_CACHE.bfloat16(), TABLE, LENS)
def result_used_in_single_precision(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    out = sdpa(q.float(), gathered(k_cache, table).float(), gathered(v_cache, table).float(), lens)
    return out * 1.001


@near_miss("dtype", "autocast")
def autocast_rounds_the_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return sdpa(q, gathered(k_cache, table), gathered(v_cache, table), lens)


# Other users, and changes in between.


@near_miss("reused", "another user")
def gathered_keys_returned(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Any:
    key = gathered(k_cache, table)
    return sdpa(q, key, gathered(v_cache, table), lens), key.mean()


@near_miss("reused", "another user")
def weights_returned(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Any:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    weights = scores.softmax(-1)
    return weights @ grouped(v_cache, table), weights


@near_miss("reused", "another user")
def logits_returned(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Any:
    scores = q @ grouped(k_cache, table).mT
    return scores.masked_fill(~visible(lens), -math.inf).softmax(-1) @ grouped(v_cache, table), scores.amax()


@near_miss("written", "k_cache", *GIVEN.args, GIVEN.k[:, 0])
def cache_written_between_gather_and_use(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, k: Tensor
) -> Tensor:
    key = gathered(k_cache, table)
    k_cache[table[:, 0].long(), 0] = k
    return sdpa(q, key, gathered(v_cache, table), lens)


@near_miss("written", "k_cache", *GIVEN.args, GIVEN.k[:, 0])
def cache_written_through_a_view(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, k: Tensor
) -> Tensor:
    flat = k_cache.view(-1, 2, 16)
    key, value = gathered(k_cache, table), gathered(v_cache, table)
    flat.index_copy_(0, table[:, 0].long() * 8, k)
    return sdpa(q, key, value, lens)


@near_miss("written", "v_cache")
def cache_zeroed_before_the_sum(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    value = grouped(v_cache, table)
    weights = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf).softmax(-1)
    v_cache.zero_()
    return weights @ value


@near_miss("written", "table")
def table_changed_before_the_use(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    key, value = gathered(k_cache, table), gathered(v_cache, table)
    table += 1
    return sdpa(q, key, value, lens)


@near_miss("written", "lens")
def lengths_changed_before_the_use(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    mask = visible(lens)
    lens.add_(1)
    key, value = gathered(k_cache, table), gathered(v_cache, table)
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


# Writes.


WRITE_ARGS = (K_CACHE, V_CACHE, GIVEN.slots[:, 0], GIVEN.k[:, 0], GIVEN.v[:, 0])


@near_miss("pairing", "same slots", *WRITE_ARGS)
def keys_only(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    k_cache[slots // 8, slots % 8] = k


@near_miss("pairing", "same slots", *WRITE_ARGS)
def other_slots(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    k_cache[slots // 8, slots % 8] = k
    v_cache[slots // 8, (slots + 1) % 8] = v


@near_miss("pairing", "same slots", *WRITE_ARGS)
def slots_changed_in_between(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    k_cache[slots // 8, slots % 8] = k
    slots.clamp_(max=9)
    v_cache[slots // 8, slots % 8] = v


@near_miss("pairing", "same slots", *WRITE_ARGS)
def one_cache_twice(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    k_cache[slots // 8, slots % 8] = k
    k_cache[slots // 8, slots % 8] = v


@near_miss("pairing", "uses the cache between", *WRITE_ARGS)
def both_caches_read_in_between(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> Any:
    k_cache[slots // 8, slots % 8] = k
    sums = k_cache.sum(), v_cache.sum()
    v_cache[slots // 8, slots % 8] = v
    return sums


@near_miss("slots", "adds to", *WRITE_ARGS)
def accumulated(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    k_cache.index_put_((slots // 8, slots % 8), k, accumulate=True)
    v_cache.index_put_((slots // 8, slots % 8), v, accumulate=True)


@near_miss("slots", "not understood", K_CACHE, torch.arange(18) % 6 == 0, GIVEN.v_cache[:3])
def picked_by_truth(k_cache: Tensor, chosen: Tensor, pages: Tensor) -> None:
    k_cache[chosen] = pages


@near_miss("slots", "no [heads, dim] at a slot", *WRITE_ARGS, torch.tensor([0, 1, 1]))
def heads_picked_per_token(
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, heads: Tensor
) -> None:
    k_cache[slots // 8, slots % 8, heads] = k[:, 0]


def test_functions_that_do_not_attend_say_nothing() -> None:
    def model(x: Tensor, index: Tensor) -> Tensor:
        y = x.clone()
        y[index] = 0.0
        return (y @ y.mT).softmax(-1)[index] + x[index].sum()

    adapted = run(model, torch.randn(8, 8, generator=RANDOM), torch.tensor([1, 3]))
    assert adapted.report.records == ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model.__name__)
def test_left_alone(case: NearMiss) -> None:
    adapted = run(case.model, *case.args, compare=not case.random)
    assert adapted.kinds == [], adapted.report
    assert [(r.rule, case.word in r.reason) for r in adapted.report.rejections][-1] == (case.rule, True), adapted.report
    assert set(adapted.rules) <= set(RULES)


def test_training_is_left_alone() -> None:
    q = Q.clone().requires_grad_()
    adapted = adapt_only(
        lambda *args: sdpa(args[0], *(gathered(c, args[3]) for c in args[1:3]), args[4]), q, *GIVEN.args[1:]
    )
    assert adapted.rules == ["gradient"], adapted.report
