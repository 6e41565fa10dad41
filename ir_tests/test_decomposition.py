"""The decomposition in all its forms against the reference, and what it costs when it is compiled."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from tcport.kernels import blocked, contraction, decomposition, reference
from tcport.kernels.call import AttentionCall, WriteCall
from tcport.testing import PagedBatch, Recipe, build_batch, paged_batches

EVERY_OPTION = {
    "scale": 0.2,
    "softcap": 5.0,
    "window": 9,
    "chunk": 11,
    "mask_columns": 17,
    "alibi": True,
    "sinks": True,
    "kv_scales": "token",
}


def rows(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The form for uncompiled code that may not read lengths."""
    return decomposition.attend(call, decomposition.rows_of(call), contraction.ROWS)


@pytest.mark.parametrize("attention", [decomposition.paged_attention, blocked.paged_attention, rows])
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(batch=paged_batches(query_dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64)))
def test_agrees_with_the_reference(attention: Callable[..., Any], batch: PagedBatch) -> None:
    batch.check(*attention(AttentionCall.of(**batch.arguments, return_lse=True)))


@pytest.mark.parametrize("attention", [decomposition.paged_attention, blocked.paged_attention, rows])
@pytest.mark.parametrize("width", [2**31, 2**40, 2**63 - 1])
@pytest.mark.parametrize("option", ["window", "chunk"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(lens=(40, 7, 0), alibi=True, index_dtype=torch.int32),
        Recipe(lens=(40, 7, 23), q_lens=(3, 7, 1), causal=False, index_dtype=torch.int32),
        Recipe(lens=(40, 7, 23), q_lens=(3, 7, 1), index_dtype=torch.int64),
    ],
)
def test_a_window_or_chunk_beyond_every_length_hides_nothing(
    attention: Callable[..., Any], width: int, option: str, recipe: Recipe
) -> None:
    """Not even where lengths are int32 and the width is not."""
    batch = build_batch(recipe)
    batch.check(*attention(AttentionCall.of(**{**batch.arguments, option: width}, return_lse=True)))


@pytest.mark.parametrize("device_reads", [True, False])
def test_small_blocks_give_the_same_result(monkeypatch: pytest.MonkeyPatch, device_reads: bool) -> None:
    """Blocks of one or a few tokens: by sequence where lengths can be read, by token where not."""
    monkeypatch.setattr(blocked, "BLOCK_NUMBERS", 1500)
    if not device_reads:
        monkeypatch.setattr(blocked, "_sequence_blocks", blocked._token_blocks)
    for recipe in (
        Recipe(lens=(40, 7, 23), q_lens=(30, 7, 1), uncovered=(2, 1), **EVERY_OPTION),
        Recipe(lens=(40,), q_lens=(30,), **EVERY_OPTION),
        Recipe(lens=(40, 7, 0), **EVERY_OPTION),
    ):
        batch = build_batch(recipe)
        batch.check(*blocked.paged_attention(AttentionCall.of(**batch.arguments, return_lse=True)))


@pytest.mark.parametrize("q_lens", [None, (3, 20, 1, 2)])
def test_uncompiled_results_do_not_depend_on_the_batch(q_lens: tuple[int, ...] | None) -> None:
    """To the bit: each sequence alone, and among others that are longer."""
    recipe = Recipe(lens=(9, 70, 33, 2), q_lens=q_lens, query_dtype=torch.bfloat16, batch_invariant=True)
    call = AttentionCall.of(**build_batch(recipe).arguments, return_lse=True)
    out, lse = blocked.paged_attention(call)
    for b, (start, end) in enumerate(zip(recipe.query_bounds, recipe.query_bounds[1:], strict=False)):
        alone = dataclasses.replace(
            call,
            query=call.query[start:end],
            block_table=call.block_table[b : b + 1],
            seq_lens=call.seq_lens[b : b + 1],
            cu_seqlens_q=None if q_lens is None else torch.tensor([0, end - start]),
        )
        out_alone, lse_alone = blocked.paged_attention(alone)
        assert torch.equal(out[start:end], out_alone)
        assert torch.equal(lse[start:end], lse_alone)


class TestTracing:
    """One trace with open sizes serves every batch: no size is fixed, no value is read."""

    @pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["plain", "every option"])
    @pytest.mark.parametrize("q_lens", [None, (2, 4, 1)], ids=["decode", "varlen"])
    def test_attention_traced_once_serves_other_sizes(
        self, q_lens: tuple[int, ...] | None, options: dict[str, Any]
    ) -> None:
        def batch_of(lens: tuple[int, ...], q_lens: tuple[int, ...] | None, seed: int) -> PagedBatch:
            return build_batch(Recipe(lens=lens, q_lens=q_lens, dims=(24, 16), page=4, seed=seed, **options))

        first = batch_of((9, 14, 3), q_lens, 0)
        call = AttentionCall.of(**first.arguments, return_lse=True)
        names = [name for name, value in vars(call).items() if isinstance(value, Tensor)]

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            values = dict(zip(names, tensors, strict=True))
            return decomposition.paged_attention(dataclasses.replace(call, **values))

        traced = make_fx(run, tracing_mode="symbolic")(*(getattr(call, name) for name in names))
        lens = (30, 0, 5, 21, 12, 8)
        for seed, size in enumerate((6, 4, 5)):
            other = batch_of(lens[:size], None if q_lens is None else (3, 2, 0, 7, 1, 2)[:size], seed)
            other.check(*traced(*(other.arguments[name] for name in names)))

    def test_write_traced_once_serves_other_sizes(self) -> None:
        def run(*tensors: Tensor) -> None:
            decomposition.kv_write(WriteCall.of(*tensors))

        def inputs(tokens: int, slots: list[int], pages: int) -> list[Tensor]:
            key, value = torch.randn(2, tokens, 2, 6)
            return [key, value, *torch.randn(2, pages, 4, 2, 6).unbind(), torch.tensor(slots)]

        traced = make_fx(run, tracing_mode="symbolic")(*inputs(5, [0, -1, 7], 3))
        for tokens, slots, pages in ((4, [23, -1, 24, 8], 6), (2, [-1, -9], 5), (9, [1, 2, 3, 5, 6], 2)):
            key, value, k_cache, v_cache, mapping = inputs(tokens, slots, pages)
            expected = k_cache.clone(), v_cache.clone()
            traced(key, value, k_cache, v_cache, mapping)
            reference.kv_write(key, value, *expected, mapping)
            assert torch.equal(k_cache, expected[0])
            assert torch.equal(v_cache, expected[1])


def allocations(code: str) -> list[int]:
    """Numbers in each buffer that generated code allocates."""
    shapes = re.findall(r"= empty_strided_cpu\(\(([\d, ]*)\)", code)
    return [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]


class TestCompiledByInductor:
    @pytest.mark.parametrize(
        "recipe",
        [
            Recipe(lens=(60, 5, 33), dims=(96, 80), query_dtype=torch.bfloat16),
            Recipe(lens=(60, 5, 33), q_lens=(7, 5, 1), dims=(96, 80), kv_dtype=torch.int8, **EVERY_OPTION),
        ],
        ids=["decode", "varlen with every option"],
    )
    def test_attention_stores_scores_but_no_gathered_keys(self, recipe: Recipe) -> None:
        batch = build_batch(recipe)
        call = AttentionCall.of(**batch.arguments, return_lse=True)
        tensors = {name: value for name, value in vars(call).items() if isinstance(value, Tensor)}

        def run(**tensors: Tensor) -> tuple[Tensor, Tensor]:
            return decomposition.paged_attention(dataclasses.replace(call, **tensors))

        result, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), **tensors)
        batch.check(*result)
        scores = recipe.num_tokens * recipe.heads[0] * batch.arguments["block_table"].shape[1] * recipe.page
        assert max(allocations(code)) == scores

    @pytest.mark.parametrize("layout", ["page_major", "head_major"])
    def test_write_allocates_nothing_of_the_size_of_the_cache(self, layout: str) -> None:
        pages, page, heads, dim, tokens = 50, 16, 2, 8, 6
        caches = list(torch.randn(2, pages, page, heads, dim).clone().unbind())
        if layout == "head_major":
            caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
        caches = [torch.empty_strided(c.shape, c.stride()).copy_(c) for c in caches]
        key, value = torch.randn(2, tokens, heads, dim)
        slots = torch.tensor([0, 17, -1, 799, 800, 31])
        expected = [cache.clone() for cache in caches]
        reference.kv_write(key, value, *expected, slots)

        def run(*tensors: Tensor) -> None:
            decomposition.kv_write(WriteCall(*tensors))

        _, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), key, value, *caches, slots)
        assert torch.equal(caches[0], expected[0])
        assert torch.equal(caches[1], expected[1])
        assert max(allocations(code)) <= tokens * heads * dim
