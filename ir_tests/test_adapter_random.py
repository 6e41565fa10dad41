"""Models put together at random from spellings that are each tested elsewhere: rewritten or not, the result stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from adapter_harness import problem, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_adapter_gathers import GATHERS
from torch import Tensor

Choose = Callable[[str, list[Any]], Any]
"""Picks one of a list; the name says what for."""


def mask_of(choose: Choose, depth: int = 2) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A formula over lens ``[B, 1, 1]``, query positions ``[B, S, 1]`` and key positions ``[L]``; key 0 is visible."""
    kind = choose(
        "formula", ["length", "causal", "window", "chunk", "prefix", "start"] + ["and", "and", "or"] * (depth > 0)
    )
    width = choose("width", [1, 3, 8, 13])
    if kind in ("and", "or"):
        a, b = mask_of(choose, depth - 1), mask_of(choose, depth - 1)
        if kind == "and":
            return lambda lens, query, keys: a(lens, query, keys) & b(lens, query, keys)
        return lambda lens, query, keys: a(lens, query, keys) | b(lens, query, keys)
    return {
        "length": lambda lens, query, keys: keys < lens,
        "causal": lambda lens, query, keys: query >= keys,
        "window": lambda lens, query, keys: query - keys < width,
        "chunk": lambda lens, query, keys: keys // width == query // width,
        "prefix": lambda lens, query, keys: keys < width,
        "start": lambda lens, query, keys: keys >= lens // 3,
    }[kind]


def model_of(choose: Choose) -> Callable[..., Tensor]:
    """A model over the arguments of a problem."""
    gather_k = choose("gather", GATHERS)
    gather_v = choose("other gather", [gather_k, *GATHERS])
    mask, form = mask_of(choose), choose("form", ["bool", "float", "inverted"])
    repeat = choose("heads", ["gqa", "interleave", "expand", "tile", "grouped"])
    spelling = choose("spelling", ["sdpa", "matmul", "einsum", "bmm"])
    scale = choose("scale", [None, 0.25, 0.1])

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        batch, heads, tokens, dim = q.shape
        key, value = gather_k(k_cache, table), gather_v(v_cache, table)
        group = heads // key.shape[1]
        query = (lens[:, None] - tokens + torch.arange(tokens))[..., None]
        visible = mask(lens[:, None, None], query, torch.arange(key.shape[2])).expand(batch, tokens, -1)
        visible = (visible | (torch.arange(key.shape[2]) == 0))[:, None]
        if repeat == "grouped":
            q, key, value, visible = (
                q.unflatten(1, (-1, group)),
                key[:, :, None],
                value[:, :, None],
                visible[:, None],
            )
        elif repeat == "interleave" or (repeat == "gqa" and spelling != "sdpa"):
            key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        elif repeat == "expand":
            key, value = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (key, value))
        elif repeat == "tile":
            key, value = (x.repeat(1, group, 1, 1) for x in (key, value))
        out = _attend(q, key, value, visible)
        return out.reshape(batch, heads, tokens, dim)

    def _attend(q: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        bias = torch.where(visible, 0.0, -math.inf)
        if spelling == "sdpa":
            given = visible if form == "bool" else bias if form == "float" else ~visible == False  # noqa: E712
            return F.scaled_dot_product_attention(q, key, value, given, scale=scale, enable_gqa=repeat == "gqa")
        factor = scale or q.shape[-1] ** -0.5
        if spelling == "bmm":
            shape = torch.broadcast_shapes(q.shape[:-2], key.shape[:-2])
            q, key, value = (x.expand(*shape, -1, -1).flatten(0, -3) for x in (q, key, value))
            visible, bias = (x.expand(*shape, -1, -1).flatten(0, -3) for x in (visible, bias))
            scores = torch.bmm(q, key.mT) * factor
        elif spelling == "einsum" and q.dim() == 4:
            scores = torch.einsum("bhsd,bhld->bhsl", q * factor, key)
        else:
            scores = q @ key.transpose(-1, -2) * factor
        scores = scores + bias if form == "float" else scores.masked_fill(~visible, -math.inf)
        weights = scores.softmax(-1)
        if spelling == "einsum" and q.dim() == 4:
            return torch.einsum("bhsl,bhld->bhsd", weights, value)
        return torch.bmm(weights, value) if spelling == "bmm" else weights @ value

    return model


@settings(max_examples=6)
@given(st.data())
def test_random_models(data: st.DataObject) -> None:
    def choose(name: str, options: list[Any]) -> Any:
        return data.draw(st.sampled_from(options), label=name)

    model = model_of(choose)
    tokens = choose("tokens", [1, 4])
    adapted = run(
        model, *problem(tokens=tokens, seed=choose("seed", [0, 1, 2])).args, dynamic=choose("dynamic", [False, True])
    )
    assert len(adapted.kinds) == 1, adapted.report
