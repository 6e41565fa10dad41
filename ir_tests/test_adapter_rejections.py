"""Near misses in what is gathered and what is masked, each with the rule it breaks and a word of the reason."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from near_misses import (
    GIVEN,
    K_CACHE,
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


@pytest.mark.parametrize("case", near_miss, ids=lambda case: case.model.__name__)
def test_left_alone(case: NearMiss) -> None:
    check_left_alone(case)
