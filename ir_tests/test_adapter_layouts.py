"""Cache layouts, head counts, dtypes and output shapes: the canonical call reads the caller's own memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import Adapted, problem, run
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

PAGED = torch.ops.tcport.paged_attention.default


def visible(lens: Tensor, keys: int) -> Tensor:
    return (torch.arange(keys) < lens[:, None])[:, None, None]


def dense(cache: Tensor, table: Tensor) -> Tensor:
    """``[B, H, L, D]`` from ``[N, P, H, D]``."""
    return cache[table].flatten(1, 2).transpose(1, 2)


def cache_views(adapted: Adapted) -> list[Node]:
    """The K and V cache of the only canonical call, each of which lies in the memory of a graph input."""
    (node,) = adapted.calls(PAGED)
    inputs = [n.meta["example_value"] for n in adapted.graph.graph.nodes if n.op == "placeholder"]
    memory = {StorageWeakRef(value.untyped_storage()) for value in inputs if isinstance(value, Tensor)}
    found = [arg for arg in node.args[1:3] if isinstance(arg, Node)]
    assert len(found) == 2
    for cache in found:
        assert StorageWeakRef(cache.meta["example_value"].untyped_storage()) in memory
    return found


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (1, 1), (10, 2)], ids=str)
def test_head_counts(heads: tuple[int, int]) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = dense(k_cache, table), dense(v_cache, table)
        return F.scaled_dot_product_attention(q, key, value, visible(lens, key.shape[2]), enable_gqa=True)

    assert run(model, *problem(heads=heads).args).kinds == ["paged_attention:sdpa"]


def test_multi_query_by_broadcast() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = dense(k_cache, table), dense(v_cache, table)
        return F.scaled_dot_product_attention(q, key, value, visible(lens, key.shape[2]))

    given = problem(heads=(4, 1))
    assert run(model, *given.args).kinds == ["paged_attention:sdpa"]


@pytest.mark.parametrize("how", ["interleave", "expand", "tile", "stacked query"])
def test_grouped_heads(how: str) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = dense(k_cache, table), dense(v_cache, table)
        if how == "interleave":
            key, value = (torch.repeat_interleave(x, 3, dim=1) for x in (key, value))
        elif how == "expand":
            key, value = (x.unsqueeze(2).expand(-1, -1, 3, -1, -1).flatten(1, 2) for x in (key, value))
        elif how == "tile":  # heads in the other order: head h of q meets KV head h % 2
            key, value = (x.repeat(1, 3, 1, 1) for x in (key, value))
        else:
            grouped = q.reshape(3, 2, 3, 16)
            return F.scaled_dot_product_attention(grouped, key, value, visible(lens, 40)).reshape(q.shape)
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40))

    assert run(model, *problem().args).kinds == ["paged_attention:sdpa"]


def test_head_major_cache() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (c[table].permute(0, 2, 1, 3, 4).flatten(2, 3) for c in (k_cache, v_cache))  # [N, H, P, D]
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    q, k_cache, v_cache, table, lens = problem().args
    caches = (c.transpose(1, 2).contiguous() for c in (k_cache, v_cache))
    adapted = run(model, q, *caches, table, lens)
    assert [tuple(c.meta["example_value"].shape) for c in cache_views(adapted)] == [(18, 8, 2, 16)] * 2


def test_transposed_key_cache() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key = k_cache[table].permute(0, 2, 3, 1, 4).flatten(3)  # [N, H, D, P] -> [B, H, D, L]
        value = dense(v_cache, table)
        scores = q.unflatten(1, (2, 3)).squeeze(3) @ key * 0.25
        scores = scores.masked_fill(~visible(lens, 40), -math.inf)
        return (scores.softmax(-1) @ value).reshape(q.shape)

    q, k_cache, v_cache, table, lens = problem().args
    adapted = run(model, q, k_cache.permute(0, 2, 3, 1).contiguous(), v_cache, table, lens)
    assert cache_views(adapted)[0].meta["example_value"].stride() == (256, 1, 128, 8)


def test_pool_of_all_layers() -> None:
    def model(q: Tensor, pool: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        for layer in range(2):
            key, value = (dense(pool[layer, i], table) for i in range(2))
            q = F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)
        return q

    given = problem()
    random = torch.Generator().manual_seed(1)
    pool = torch.randn(2, 2, *given.k_cache.shape, generator=random)
    adapted = run(model, given.q, pool, given.table, given.lens)
    assert adapted.kinds == ["paged_attention:sdpa"] * 2
    first, second = adapted.calls(PAGED)
    assert first.args[3:5] == second.args[3:5], "layers share their table and lengths"


def test_keys_and_values_of_a_page_adjacent() -> None:
    def model(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = cache.unbind(1)  # [N, 2, P, H, D]
        key, value = dense(key, table), dense(value, table)
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    given = problem()
    cache = torch.stack([given.k_cache, given.v_cache], 1)
    cache_views(run(model, given.q, cache, given.table, given.lens))


def test_keys_and_values_gathered_at_once() -> None:
    def model(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        both = cache[table].permute(2, 0, 4, 1, 3, 5).flatten(3, 4)  # [2, B, H, L, D]
        return F.scaled_dot_product_attention(q, both[0], both[1], visible(lens, 40), enable_gqa=True)

    given = problem()
    cache = torch.stack([given.k_cache, given.v_cache], 1)
    cache_views(run(model, given.q, cache, given.table, given.lens))


@pytest.mark.parametrize("how", ["split", "chunk", "slice"])
def test_keys_and_values_of_a_head_adjacent(how: str) -> None:
    def model(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        rows = dense(cache, table)  # [N, P, H, 2 * D]
        if how == "split":
            key, value = rows.split(16, dim=-1)
        elif how == "chunk":
            key, value = torch.chunk(rows, 2, -1)
        else:
            key, value = rows[..., :16], rows[..., -16:]
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    given = problem()
    cache = torch.cat([given.k_cache, given.v_cache], -1)
    cache_views(run(model, given.q, cache, given.table, given.lens))


def test_heads_merged_into_rows() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (c[table].view(3, 40, 2, 16).transpose(1, 2) for c in (k_cache, v_cache))  # [N, P, H * D]
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    q, k_cache, v_cache, table, lens = problem().args
    cache_views(run(model, q, k_cache.flatten(2), v_cache.flatten(2), table, lens))


@pytest.mark.parametrize("dynamic", [False, True])
def test_flat_cache_with_pages(dynamic: bool) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        slots = (table[:, :, None] * 8 + torch.arange(8)).reshape(3, 40)
        key, value = (c[slots].transpose(1, 2) for c in (k_cache, v_cache))  # [N * P, H, D]
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    q, k_cache, v_cache, table, lens = problem().args
    adapted = run(model, q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), table, lens, dynamic=dynamic)
    assert [tuple(c.meta["example_value"].shape) for c in cache_views(adapted)] == [(18, 8, 2, 16)] * 2


def test_flat_cache_with_a_slot_per_token() -> None:
    """No pages at all: every token has its own slot, as in continuous batching. Pages of one token say the same."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, lens: Tensor) -> Tensor:
        key, value = (c[slots].transpose(1, 2) for c in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    given = problem()
    slots = torch.randperm(144, generator=torch.Generator().manual_seed(1))[:120].reshape(3, 40)
    adapted = run(model, given.q, given.k_cache.flatten(0, 1), given.v_cache.flatten(0, 1), slots, given.lens)
    assert [tuple(c.meta["example_value"].shape) for c in cache_views(adapted)] == [(144, 1, 2, 16)] * 2


def test_one_page_per_request() -> None:
    """A cache with a row per request, picked by request id."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, requests: Tensor, lens: Tensor) -> Tensor:
        key, value = (c[requests].transpose(1, 2) for c in (k_cache, v_cache))  # [R, L, H, D]
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 8), enable_gqa=True)

    given = problem()
    adapted = run(model, given.q, given.k_cache, given.v_cache, torch.tensor([7, 0, 3]), given.lens.clamp(max=8))
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


@pytest.mark.parametrize("dynamic", [False, True])
def test_table_rows_picked_by_request(dynamic: bool) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, rows: Tensor) -> Tensor:
        mine = table[rows]
        key, value = dense(k_cache, mine), dense(v_cache, mine)
        return F.scaled_dot_product_attention(q, key, value, visible(lens[rows], key.shape[2]), enable_gqa=True)

    adapted = run(model, *problem().args, torch.tensor([2, 0, 1]), dynamic=dynamic)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


def test_table_narrower_than_its_tensor() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = dense(k_cache, table[:, :3]), dense(v_cache, table[:, :3])
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 24), enable_gqa=True)

    adapted = run(model, *problem().args)  # lengths beyond 24 keys: 24 keys are seen
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


def test_keys_cut_at_the_longest_sequence() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = dense(k_cache, table)[:, :, :29], dense(v_cache, table)[:, :, :29]
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 29), enable_gqa=True)

    assert run(model, *problem().args).kinds == ["paged_attention:sdpa"]


def test_value_is_a_view_of_key() -> None:
    def model(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        latent = cache[table].flatten(1, 2)  # [N, P, 24], one latent head
        scores = torch.einsum("bhd,bld->bhl", q, latent) * 24**-0.5
        weights = scores.masked_fill(torch.arange(40) >= lens[:, None, None], -math.inf).softmax(-1)
        return torch.einsum("bhl,bld->bhd", weights, latent[..., :16])

    given = problem(dim=24, heads=(6, 1))
    adapted = run(model, given.q[:, :, 0], given.k_cache[:, :, 0], given.table, given.lens)
    shapes = [tuple(c.meta["example_value"].shape) for c in cache_views(adapted)]
    assert shapes == [(18, 8, 1, 24), (18, 8, 1, 16)]


def test_query_from_a_fused_projection_and_output_projection() -> None:
    def model(x: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, proj: Tensor) -> Tensor:
        q, _, _ = x.split([96, 32, 32], dim=-1)
        q = q.view(3, 1, 6, 16).transpose(1, 2)
        key, value = dense(k_cache, table), dense(v_cache, table)
        out = F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)
        return out.transpose(1, 2).reshape(3, 1, 96) @ proj

    given = problem()
    random = torch.Generator().manual_seed(1)
    x, proj = torch.randn(3, 1, 160, generator=random), torch.randn(96, 96, generator=random) / 10
    adapted = run(model, x, *given.args[1:], proj)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


@pytest.mark.parametrize("tokens", [1, 5])
def test_output_viewed_as_it_was_laid_out(tokens: int) -> None:
    """A ``view`` that only the original strides allow."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(3, 1) for x in (dense(k_cache, table), dense(v_cache, table)))
        query = (lens - tokens)[:, None] + torch.arange(tokens)
        scores = (q @ key.mT).masked_fill((torch.arange(40) > query[..., None])[:, None], -math.inf)
        out = scores.softmax(-1) @ value
        return out.view(3, 6 * tokens, 16) * 2

    assert run(model, *problem(tokens=tokens).args).kinds == ["paged_attention:softmax"]


def test_scales() -> None:
    def scaled(scale: float | None) -> Any:
        def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
            key, value = dense(k_cache, table), dense(v_cache, table)
            mask = visible(lens, 40)
            return F.scaled_dot_product_attention(q, key, value, mask, scale=scale, enable_gqa=True)

        return model

    for scale in (None, 0.25, 1.0, 0.07):
        (node,) = run(scaled(scale), *problem().args).calls(PAGED)
        assert node.kwargs.get("scale") == scale


def test_scaled_keys_and_values() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = dense(k_cache, table) * 0.5, 3.0 * dense(v_cache, table)
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    assert run(model, *problem().args).kinds == ["paged_attention:sdpa"]


@pytest.mark.parametrize("scale_shape", [(), (1,), (2,), (18, 8, 2)], ids=str)
def test_int8_cache(scale_shape: tuple[int, ...]) -> None:
    def model(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, k_scale: Tensor, v_scale: Tensor
    ) -> Tensor:
        def values(cache: Tensor, scale: Tensor) -> Tensor:
            rows = cache[table].to(torch.float32)  # [B, M, P, H, D]
            if scale.dim() == 3:
                return (rows * scale[table][..., None]).flatten(1, 2).transpose(1, 2)
            return (rows * scale.reshape(-1, 1)).flatten(1, 2).transpose(1, 2)

        key, value = values(k_cache, k_scale), values(v_cache, v_scale)
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    given = problem()
    caches = ((c * 40).round().to(torch.int8) for c in (given.k_cache, given.v_cache))
    random = torch.Generator().manual_seed(1)
    scales = (torch.rand(scale_shape, generator=random) / 30 + 0.01 for _ in range(2))
    adapted = run(model, given.q, *caches, given.table, given.lens, *scales)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report
    (node,) = adapted.calls(PAGED)
    assert {"k_scale", "v_scale"} <= set(node.kwargs)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_cache(kv_dtype: torch.dtype) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (dense(c.view(kv_dtype), table).to(q.dtype) for c in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    given = problem()
    caches = (c.to(kv_dtype).view(torch.uint8) for c in (given.k_cache, given.v_cache))
    adapted = run(model, given.q, *caches, given.table, given.lens)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


def test_autocast_brings_the_query_to_the_cache() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            key, value = dense(k_cache, table), dense(v_cache, table)
            return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    given = problem()
    caches = (c.bfloat16() for c in (given.k_cache, given.v_cache))
    adapted = run(model, given.q, *caches, given.table, given.lens)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


def test_meta_survives() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = dense(k_cache, table), dense(v_cache, table)
        return F.scaled_dot_product_attention(q, key, value, visible(lens, 40), enable_gqa=True)

    (node,) = run(model, *problem().args).calls(PAGED)
    out, lse = node.meta["example_value"]
    assert (tuple(out.shape), tuple(lse.shape)) == ((3, 6, 16), (0,))
    assert "scaled_dot_product_attention" in node.meta["stack_trace"]
