"""Near misses in logits, weights, dtypes, other uses and writes, each with the rule it breaks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import adapt_only, run
from near_misses import (
    GIVEN,
    K_CACHE,
    LENS,
    RANDOM,
    TABLE,
    V_CACHE,
    NearMiss,
    NearMisses,
    Q,
    check_left_alone,
    gathered,
    grouped,
    sdpa,
    visible,
)
from torch import Tensor

near_miss = NearMisses()


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


@near_miss("dtype", "rounds logits or weights")
def weights_rounded(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    return scores.softmax(-1).bfloat16().float() @ grouped(v_cache, table)


@near_miss("dtype", "rounds logits or weights")
def softmax_of_rounded_logits(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    scores = (q @ grouped(k_cache, table).mT).masked_fill(~visible(lens), -math.inf)
    return F.softmax(scores, -1, dtype=torch.float16).float() @ grouped(v_cache, table)


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


@pytest.mark.parametrize("case", near_miss, ids=lambda case: case.model.__name__)
def test_left_alone(case: NearMiss) -> None:
    check_left_alone(case)


def test_functions_that_do_not_attend_say_nothing() -> None:
    def model(x: Tensor, index: Tensor) -> Tensor:
        y = x.clone()
        y[index] = 0.0
        return (y @ y.mT).softmax(-1)[index] + x[index].sum()

    adapted = run(model, torch.randn(8, 8, generator=RANDOM), torch.tensor([1, 3]))
    assert adapted.report.records == ()


def test_training_is_left_alone() -> None:
    q = Q.clone().requires_grad_()
    adapted = adapt_only(
        lambda *args: sdpa(args[0], *(gathered(c, args[3]) for c in args[1:3]), args[4]), q, *GIVEN.args[1:]
    )
    assert adapted.rules == ["gradient"], adapted.report
