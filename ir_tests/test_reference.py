"""The reference against definitions written another way: one token, one head, one Python predicate at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tcport.kernels import reference
from tcport.testing import PagedBatch, Recipe, build_batch, paged_batches


def row(cache: Tensor, scale: Tensor | None, page: int, offset: int, head: int) -> Tensor:
    """One dequantised key or value, fp64."""
    stored = cache[page, offset, head].double()
    if scale is None:
        return stored
    if scale.dim() == 3:
        return stored * scale[page, offset, head].double()
    return stored * scale.double().flatten()[head if scale.numel() > 1 else 0]


def attention_of_one(batch: PagedBatch, token: int, head: int) -> tuple[Tensor, float]:
    """Output and LSE of one token and head, from the words of the definitions."""
    recipe, a = batch.recipe, batch.arguments
    empty = torch.zeros(recipe.dims[1], dtype=torch.float64)
    sink = [] if a["sinks"] is None else [float(a["sinks"][head])]
    bounds = recipe.query_bounds
    owners = [b for b in range(len(recipe.lens)) if bounds[b] <= token < bounds[b + 1]]
    if not owners:
        return empty, sink[0] if sink else -math.inf
    b = owners[0]
    own_position = recipe.lens[b] - (bounds[b + 1] - token)

    def sees(position: int) -> bool:
        if recipe.causal and position > own_position:
            return False
        if recipe.window is not None and own_position - position >= recipe.window:
            return False
        if recipe.chunk is not None and math.floor(position / recipe.chunk) != math.floor(own_position / recipe.chunk):
            return False
        return recipe.mask_columns is None or (position < recipe.mask_columns and bool(a["mask"][token, position]))

    logits, values = [], []
    for position in filter(sees, range(recipe.lens[b])):
        place = (int(a["block_table"][b, position // recipe.page]), position % recipe.page)
        kv_head = head * recipe.heads[1] // recipe.heads[0]
        logit = float(a["query"][token, head].double() @ row(a["k_cache"], a["k_scale"], *place, kv_head))
        logit *= recipe.dims[0] ** -0.5 if recipe.scale is None else recipe.scale
        if recipe.softcap:
            logit = recipe.softcap * math.tanh(logit / recipe.softcap)
        if recipe.alibi:
            logit += float(a["alibi_slopes"][head]) * (position - own_position)
        logits.append(logit)
        values.append(row(a["v_cache"], a["v_scale"], *place, kv_head))
    if not logits:
        return empty, sink[0] if sink else -math.inf
    top = max(logits + sink)
    denominator = sum(math.exp(logit - top) for logit in logits + sink)
    out = sum((math.exp(logit - top) / denominator * value for logit, value in zip(logits, values, strict=True)), empty)
    return out, top + math.log(denominator)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(paged_batches(max_sequences=3, max_length=24, max_query=4, heads=((1, 1), (4, 2), (3, 1)), dims=(8, 5)))
def test_reference_is_the_definition(batch: PagedBatch) -> None:
    out, lse = batch.reference()
    for token in range(batch.recipe.num_tokens):
        for head in range(batch.recipe.heads[0]):
            expected_out, expected_lse = attention_of_one(batch, token, head)
            torch.testing.assert_close(out[token, head], expected_out, rtol=1e-10, atol=1e-10)
            assert math.isclose(float(lse[token, head]), expected_lse, rel_tol=1e-10, abs_tol=1e-10)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_dense_attention(causal: bool, alibi: bool, sinks: bool) -> None:
    """The sequence gathered by hand, through torch's own attention in fp64. A sink is a key of zeros with a bias."""
    length, count = 37, 9
    recipe = Recipe(lens=(length,), q_lens=(count,), heads=(6, 2), dims=(24, 16), page=5, causal=causal)
    batch = build_batch(Recipe(**{**vars(recipe), "alibi": alibi, "sinks": sinks}))
    a = batch.arguments
    pages = a["block_table"][0, : -(-length // 5)].long()
    key, value = (a[name][pages].flatten(0, 1)[:length].double().transpose(0, 1) for name in ("k_cache", "v_cache"))
    distance = torch.arange(length) - torch.arange(length - count, length)[:, None]
    bias = torch.zeros(6, count, length, dtype=torch.float64)
    if alibi:
        bias = a["alibi_slopes"].double()[:, None, None] * distance
    if causal:
        bias = bias.masked_fill(distance > 0, -torch.inf)
    if sinks:
        key, value = (torch.cat([x, x.new_zeros(2, 1, x.shape[2])], dim=1) for x in (key, value))
        bias = torch.cat([bias, a["sinks"].double()[:, None, None].expand(6, count, 1)], dim=2)
    expected = scaled_dot_product_attention(
        a["query"].double().transpose(0, 1)[None], key[None], value[None], attn_mask=bias[None], enable_gqa=True
    )
    torch.testing.assert_close(batch.reference()[0], expected[0].transpose(0, 1), rtol=1e-10, atol=1e-10)


class TestLiteralValues:
    """Numbers worked out by hand: keys of zeros (equal logits) and values that count 1, 2, 3, 4."""

    def attention(self, length: int = 4, **options: Any) -> tuple[float, float]:
        cache = torch.zeros(1, 4, 1, 1)
        values = torch.arange(1.0, 5.0).view(1, 4, 1, 1)
        query, table, lens = torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([length])
        out, lse = reference.paged_attention(query, cache, values, table, lens, **options)
        return float(out), float(lse)

    def test_equal_logits_average_the_values(self) -> None:
        assert self.attention() == pytest.approx((2.5, math.log(4)))
        assert self.attention(length=1) == pytest.approx((1.0, 0.0))

    def test_a_window_keeps_the_last_keys(self) -> None:
        assert self.attention(window=2) == pytest.approx((3.5, math.log(2)))

    def test_the_widest_window_hides_nothing(self) -> None:
        """Not even from a token that lies before the first key, where its far end is past the smallest int64."""
        assert self.attention(window=2**63 - 1) == pytest.approx((2.5, math.log(4)))
        query, caches = torch.ones(2, 1, 1), torch.ones(1, 1, 1, 1)
        one_key = (query, caches, caches, torch.zeros(1, 1).int(), torch.tensor([1]), torch.tensor([0, 2]))
        out, _ = reference.paged_attention(*one_key, causal=False, window=2**63 - 1)
        assert out.flatten().tolist() == [1.0, 1.0]

    def test_a_chunk_keeps_its_own_keys(self) -> None:
        assert self.attention(chunk=3) == pytest.approx((4.0, 0.0))

    def test_a_sink_takes_its_share(self) -> None:
        assert self.attention(sinks=torch.tensor([math.log(4.0)])) == pytest.approx((1.25, math.log(8)))

    def test_alibi_weighs_by_distance(self) -> None:
        slope = torch.tensor([math.log(2.0)])  # weights 1/8, 1/4, 1/2, 1
        assert self.attention(alibi_slopes=slope) == pytest.approx((6.125 / 1.875, math.log(1.875)))

    def test_a_mask_says_which_keys_are_visible(self) -> None:
        mask = torch.tensor([[True, False, True]])
        assert self.attention(mask=mask) == pytest.approx((2.0, math.log(2)))

    def test_scales_multiply_what_is_stored(self) -> None:
        assert self.attention(v_scale=torch.tensor(2.0)) == pytest.approx((5.0, math.log(4)))

    def test_logits_are_scaled_then_capped(self) -> None:
        one = torch.ones(1, 1, 1, 1)
        out, lse = reference.paged_attention(
            torch.full((1, 1, 1), 6.0), one, one, torch.zeros(1, 1).int(), torch.tensor([1]), scale=0.5, softcap=2.0
        )
        assert (float(out), float(lse)) == pytest.approx((1.0, 2.0 * math.tanh(1.5)))

    def test_rows_that_see_nothing(self) -> None:
        assert self.attention(length=0) == (0.0, -math.inf)
        assert self.attention(length=0, sinks=torch.tensor([3.0])) == (0.0, 3.0)
        assert self.attention(mask=torch.zeros(1, 9, dtype=torch.bool)) == (0.0, -math.inf)


def test_a_double_row_is_stored_in_full() -> None:
    third = torch.tensor([[[1 / 3]]], dtype=torch.float64)
    k_cache, v_cache = torch.zeros(2, 1, 1, 1, 1, dtype=torch.float64)
    reference.kv_write(third, third, k_cache, v_cache, torch.tensor([0]), v_scale=torch.tensor(3.0))
    assert k_cache.item() == 1 / 3
    assert v_cache.item() == 1 / 3 / 3
