"""Whole modules as people write them: every layer is found, and a few decode steps give what the module gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import Adapted, problem, run
from torch import Tensor, nn

from tcport.adapter import adapt

PAGE, DIM, HEADS, KV_HEADS, LAYERS = 8, 16, 6, 2, 2
WIDTH = HEADS * DIM


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """``x [B, H, S, D]`` rotated by ``positions [B, S]``."""
    angles = positions[..., None].float() / 100 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def repeat_kv(hidden: Tensor, times: int) -> Tensor:
    batch, heads, length, dim = hidden.shape
    return hidden[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


class PagedCache(nn.Module):
    """K and V of one layer in pages, as buffers."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(pages, PAGE, KV_HEADS, DIM))
        self.register_buffer("v", torch.zeros(pages, PAGE, KV_HEADS, DIM))

    def update(self, k: Tensor, v: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        page = torch.gather(table, 1, positions // PAGE)
        self.k[page, positions % PAGE] = k.transpose(1, 2)
        self.v[page, positions % PAGE] = v.transpose(1, 2)
        batch = table.shape[0]
        keys = self.k[table].reshape(batch, -1, KV_HEADS, DIM).transpose(1, 2)
        values = self.v[table].reshape(batch, -1, KV_HEADS, DIM).transpose(1, 2)
        return keys, values


class Decoder(nn.Module):
    """A small decoder: norms, rotary positions, gated MLP, paged attention written by hand or with SDPA."""

    def __init__(self, attention: str, pages: int) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(LAYERS))
        self.outputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(LAYERS)
        )
        self.caches = nn.ModuleList(PagedCache(pages) for _ in range(LAYERS))

    def forward(self, x: Tensor, table: Tensor, start: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        positions = start[:, None] + torch.arange(tokens)
        for layer in range(LAYERS):
            qkv = self.projections[layer](self.norms[2 * layer](x)).view(batch, tokens, -1, DIM).transpose(1, 2)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            q, k = rope(q, positions), rope(k, positions)
            keys, values = self.caches[layer].update(k, v, table, positions)
            mask = torch.arange(keys.shape[2]) <= positions[:, None, :, None]
            if self.attention == "sdpa":
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            else:
                keys, values = repeat_kv(keys, HEADS // KV_HEADS), repeat_kv(values, HEADS // KV_HEADS)
                scores = torch.matmul(q, keys.transpose(2, 3)) / math.sqrt(DIM)
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
                out = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ values
            x = x + self.outputs[layer](out.transpose(1, 2).contiguous().view(batch, tokens, WIDTH))
            x = x + self.mlps[layer](self.norms[2 * layer + 1](x))
        return x


def compiled(module: Callable[..., Any], found: list[Adapted], **options: Any) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found.append(Adapted(adapt(gm), gm))
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(module, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("attention", ["sdpa", "written out"])
def test_decoder_prefills_and_decodes(attention: str) -> None:
    torch.manual_seed(0)
    table = torch.randperm(12)[:10].reshape(2, 5)
    eager = Decoder(attention, pages=12).eval()
    module = copy.deepcopy(eager)
    found: list[Adapted] = []
    step = compiled(module, found, dynamic=True)
    start = torch.zeros(2, dtype=torch.long)
    for tokens in (6, 11, 1, 1):
        x = torch.randn(2, tokens, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(step(x, table, start), eager(x, table, start), rtol=0, atol=1e-4)
        start = start + tokens
    for mine, theirs in zip(module.caches, eager.caches, strict=True):
        torch.testing.assert_close(mine.k, theirs.k, rtol=0, atol=1e-4)
        torch.testing.assert_close(mine.v, theirs.v, rtol=0, atol=1e-4)
    assert len(found) == 2, "one graph for any number of tokens, and one for a single token"
    matcher = "sdpa" if attention == "sdpa" else "softmax"
    for adapted in found:
        assert adapted.kinds == ["kv_write:writes", f"paged_attention:{matcher}"] * LAYERS, adapted.report
        assert not adapted.rules
    (prefill, *_), (decode, *_) = (a.calls(torch.ops.tcport.paged_attention.default) for a in found)
    assert len(prefill.args) == 6
    assert set(prefill.kwargs) <= {"scale"}, "causality and length came out of the mask"
    assert len(decode.args) == 5


def test_parameters_do_not_record_gradients_without_grad() -> None:
    """Parameters require gradients; under inference mode the graph does not record them."""
    found: list[Adapted] = []
    module = Decoder("sdpa", pages=12).eval()
    x, table, start = torch.randn(2, 1, WIDTH), torch.arange(10).reshape(2, 5), torch.zeros(2, dtype=torch.long)
    with torch.inference_mode():
        compiled(module, found)(x, table, start)
    assert found[0].kinds.count("paged_attention:sdpa") == LAYERS


class CausalSelfAttention(nn.Module):
    """The attention of a small GPT, over a pool of pages that all layers share."""

    def __init__(self, layer: int, pool: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.pool = pool
        self.c_attn = nn.Linear(64, 3 * 64)
        self.c_proj = nn.Linear(64, 64)
        self.attn_dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        batch, _, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(batch, 1, 4, width // 4).transpose(1, 2) for t in (q, k, v))
        last = lens - 1
        slot = table[torch.arange(batch), last // PAGE] * PAGE + last % PAGE
        keys = self.pool[self.layer, 0].flatten(0, 1)
        values = self.pool[self.layer, 1].flatten(0, 1)
        keys.index_copy_(0, slot, k.squeeze(2))
        values.index_copy_(0, slot, v.squeeze(2))
        rows = (table[:, :, None] * PAGE + torch.arange(PAGE)).view(batch, -1)
        k, v = keys[rows].transpose(1, 2), values[rows].transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill((torch.arange(k.size(2)) >= lens[:, None])[:, None, None, :], float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = att @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, 1, width))


def test_small_gpt_over_one_pool() -> None:
    torch.manual_seed(0)
    pools = [torch.randn(3, 2, 12, PAGE, 4, 16) for _ in range(2)]
    pools[1].copy_(pools[0])
    layers = [nn.ModuleList(CausalSelfAttention(i, pool) for i in range(3)).eval() for pool in pools]
    layers[1].load_state_dict(layers[0].state_dict())
    table, lens, x = torch.randperm(12)[:8].reshape(2, 4), torch.tensor([9, 32]), torch.randn(2, 1, 64)

    def model(blocks: nn.ModuleList) -> Callable[..., Tensor]:
        def forward(x: Tensor, table: Tensor, lens: Tensor) -> Tensor:
            for block in blocks:
                x = x + block(x, table, lens)
            return x

        return forward

    found: list[Adapted] = []
    with torch.no_grad():
        expected = model(layers[0])(x, table, lens)
        actual = compiled(model(layers[1]), found)(x, table, lens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=1e-4)
    assert found[0].kinds == ["kv_write:writes", "paged_attention:softmax"] * 3, found[0].report


# What matches have to do with each other.


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table].flatten(1, 2).transpose(1, 2)


def visible(lens: Tensor) -> Tensor:
    return (torch.arange(40) < lens[:, None])[:, None, None]


def test_attentions_that_share_a_gather_go_together() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        keys, values = gathered(k_cache, table), gathered(v_cache, table)
        out = F.scaled_dot_product_attention(q, keys, values, visible(lens), enable_gqa=True)
        return F.scaled_dot_product_attention(out, keys, values, visible(lens), enable_gqa=True)

    adapted = run(model, *problem().args)
    assert adapted.kinds == ["paged_attention:sdpa"] * 2
    assert not [node for node in adapted.graph.graph.nodes if "scaled_dot" in str(node.target)]


def test_attentions_that_share_a_gather_stay_together() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, bias: Tensor) -> Tensor:
        keys, values = gathered(k_cache, table), gathered(v_cache, table)
        out = F.scaled_dot_product_attention(q, keys, values, visible(lens), enable_gqa=True)
        return F.scaled_dot_product_attention(out, keys, values, bias, enable_gqa=True)

    bias = torch.randn(3, 1, 1, 40, generator=torch.Generator().manual_seed(1))
    adapted = run(model, *problem().args, bias)
    assert adapted.rules == ["reused", "mask"], adapted.report


def test_equal_attentions_stay_apart() -> None:
    """Two results that are equal are still two tensors: one is changed in place."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = gathered(k_cache, table), gathered(v_cache, table)
        first = F.scaled_dot_product_attention(q, keys, values, visible(lens), enable_gqa=True)
        second = F.scaled_dot_product_attention(q, keys, values, visible(lens), enable_gqa=True)
        first.add_(1)
        return first, second

    assert run(model, *problem().args).kinds == ["paged_attention:sdpa"] * 2


def test_result_changed_in_place() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        keys, values = gathered(k_cache, table), gathered(v_cache, table)
        out = F.scaled_dot_product_attention(q, keys, values, visible(lens), enable_gqa=True)
        flat = out.view(3, -1)
        flat.mul_(2)
        return out + 1

    assert run(model, *problem().args).kinds == ["paged_attention:sdpa"]


def test_query_changed_in_place_before() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        scaled = q.clone()
        heads = scaled.view(3, 6, 16)
        scaled *= 0.5
        heads += 1
        keys, values = gathered(k_cache, table), gathered(v_cache, table)
        return F.scaled_dot_product_attention(scaled, keys, values, visible(lens), enable_gqa=True)

    assert run(model, *problem().args).kinds == ["paged_attention:sdpa"]


def test_lengths_counted_up_before() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        lens += 1
        keys, values = gathered(k_cache, table), gathered(v_cache, table)
        first = F.scaled_dot_product_attention(q, keys, values, visible(lens), enable_gqa=True)
        lens -= 3
        return first, F.scaled_dot_product_attention(
            q, gathered(k_cache, table), gathered(v_cache, table), visible(lens), enable_gqa=True
        )

    given = problem()
    adapted = run(model, *given.args[:4], given.lens.clamp(min=4, max=39))
    assert adapted.kinds == ["paged_attention:sdpa"] * 2
    first, second = adapted.calls(torch.ops.tcport.paged_attention.default)
    assert first.args[4] is not second.args[4], "the lengths are read anew"


def test_canonical_calls_are_recorded() -> None:
    import tcport

    def model(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor, k: Tensor
    ) -> Tensor:
        tcport.kv_write(k, k, k_cache, v_cache, slots)
        return tcport.paged_attention(q.squeeze(2), k_cache, v_cache, table, lens)

    given = problem()
    adapted = run(model, *given.args, given.slots[:, 0], given.k[:, 0])
    assert adapted.kinds == ["canonical:canonical"] * 2
    assert not adapted.rules
