"""Masks: what each spelling becomes in the canonical call, and that the result stays the same."""

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
Mask = Callable[[Tensor, int, int], Any]
"""From lens ``[B]``, number of query tokens and of keys to an ``attn_mask``."""


def attend(mask: Mask) -> Callable[..., Tensor]:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        attn_mask = mask(lens, q.shape[2], key.shape[2])
        return F.scaled_dot_product_attention(q, key, value, attn_mask=attn_mask, enable_gqa=True)

    return model


def options(adapted: Adapted) -> dict[str, Any]:
    """The keyword arguments of the only canonical call, tensors as True; ``cu`` for packed query tokens."""
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report
    (node,) = adapted.calls(PAGED)
    given = {name: True if isinstance(value, torch.fx.Node) else value for name, value in node.kwargs.items()}
    return given | ({"cu": True} if len(node.args) > 5 else {})


# One query token per sequence: every length mask is just a length.


def less_than(lens: Tensor, tokens: int, keys: int) -> Tensor:
    return (torch.arange(keys)[None] < lens[:, None])[:, None, None]


def greater_than(lens: Tensor, tokens: int, keys: int) -> Tensor:
    return lens.view(-1, 1, 1, 1) > torch.arange(keys).view(1, 1, 1, -1)


def up_to_position(lens: Tensor, tokens: int, keys: int) -> Tensor:
    position = lens - 1
    return torch.arange(keys)[None, None, None, :] <= position[:, None, None, None]


def not_beyond(lens: Tensor, tokens: int, keys: int) -> Tensor:
    return ~(torch.arange(keys) >= lens.unsqueeze(-1)).unsqueeze(1).unsqueeze(1)


def logical_not_beyond(lens: Tensor, tokens: int, keys: int) -> Tensor:
    return torch.logical_not(torch.ge(torch.arange(keys), lens[:, None, None, None]))


def expanded(lens: Tensor, tokens: int, keys: int) -> Tensor:
    positions = torch.arange(keys).expand(lens.shape[0], keys)
    return positions.lt(lens[:, None])[:, None, None, :].expand(-1, 1, tokens, keys)


def clamped_out(lens: Tensor, tokens: int, keys: int) -> Tensor:
    return (torch.arange(keys)[None] - lens[:, None] < 0).reshape(-1, 1, 1, keys)


def both_ends(lens: Tensor, tokens: int, keys: int) -> Tensor:
    positions = torch.arange(keys)
    return ((positions >= 0) & (positions < lens[:, None]))[:, None, None]


def where_float(lens: Tensor, tokens: int, keys: int) -> Tensor:
    hidden = torch.arange(keys)[None] >= lens[:, None]
    return torch.where(hidden, float("-inf"), 0.0)[:, None, None]


def filled_float(lens: Tensor, tokens: int, keys: int) -> Tensor:
    visible = (torch.arange(keys)[None] < lens[:, None])[:, None, None]
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


def filled_in_place(lens: Tensor, tokens: int, keys: int) -> Tensor:
    bias = torch.zeros(lens.shape[0], 1, 1, keys)
    bias.masked_fill_((torch.arange(keys)[None] >= lens[:, None])[:, None, None], float("-inf"))
    return bias


def one_minus_mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
    visible = (torch.arange(keys)[None] < lens[:, None]).float()
    return ((1.0 - visible) * -1e9)[:, None, None]


def inverted_times_min(lens: Tensor, tokens: int, keys: int) -> Tensor:
    hidden = torch.arange(keys)[None] >= lens[:, None]
    return hidden.to(torch.float32)[:, None, None] * torch.finfo(torch.float32).min


def log_of_mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
    return (torch.arange(keys)[None] < lens[:, None]).float().log()[:, None, None]


LENGTHS: list[Mask] = [
    less_than,
    greater_than,
    up_to_position,
    not_beyond,
    logical_not_beyond,
    expanded,
    clamped_out,
    both_ends,
    where_float,
    filled_float,
    filled_in_place,
    one_minus_mask,
    inverted_times_min,
    log_of_mask,
]


@pytest.mark.parametrize("mask", LENGTHS, ids=lambda m: m.__name__)
def test_length(mask: Mask) -> None:
    adapted = run(attend(mask), *problem().args)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report
    assert options(adapted) == {}


def test_no_mask_means_every_key() -> None:
    adapted = run(attend(lambda lens, tokens, keys: None), *problem().args)
    assert options(adapted) == {}
    assert "there is no length" in adapted.report.matches[0].notes[0]


def test_two_lengths_are_their_minimum() -> None:
    adapted = run(
        attend(lambda lens, tokens, keys: less_than(lens, tokens, keys) & less_than(lens // 2 + 1, tokens, keys)),
        *problem().args,
    )
    assert options(adapted) == {}
    assert len(adapted.calls(torch.minimum)) == 1


def test_length_longer_than_the_table_means_the_table() -> None:
    adapted = run(attend(lambda lens, tokens, keys: less_than(lens + 50, tokens, keys)), *problem().args)
    assert options(adapted) == {}


# Windows and chunks.


@pytest.mark.parametrize("width", [1, 7, 8, 9])
def test_window(width: int) -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        positions = torch.arange(keys)
        return ((positions < lens[:, None]) & (positions >= lens[:, None] - width))[:, None, None]

    assert options(run(attend(mask), *problem().args)) == {"window": width}


def test_window_by_distance() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        distance = (lens - 1)[:, None] - torch.arange(keys)
        return ((distance >= 0) & (distance < 6))[:, None, None]

    assert options(run(attend(mask), *problem().args)) == {"window": 6}


def test_chunk() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        positions, last = torch.arange(keys), (lens - 1)[:, None]
        return ((positions <= last) & (positions // 12 == last // 12))[:, None, None]

    assert options(run(attend(mask), *problem().args)) == {"chunk": 12}


def test_lower_bound_of_its_own_is_a_mask() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:  # left padding
        positions = torch.arange(keys)
        return ((positions < lens[:, None]) & (positions >= lens[:, None] // 3))[:, None, None]

    assert options(run(attend(mask), *problem().args)) == {"mask": True}


# Several query tokens per sequence.


def causal_by_position(lens: Tensor, tokens: int, keys: int) -> Tensor:
    query = (lens - tokens)[:, None] + torch.arange(tokens)
    return (torch.arange(keys) <= query[..., None])[:, None]


def causal_by_difference(lens: Tensor, tokens: int, keys: int) -> Tensor:
    query = lens[:, None, None, None] - tokens + torch.arange(tokens)[:, None]
    return query - torch.arange(keys) >= 0


def causal_and_length(lens: Tensor, tokens: int, keys: int) -> Tensor:
    return causal_by_position(lens, tokens, keys) & less_than(lens, tokens, keys)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", [causal_by_position, causal_by_difference, causal_and_length])
def test_causal_chunk_of_tokens(mask: Mask, dynamic: bool) -> None:
    adapted = run(attend(mask), *problem(tokens=4).args, dynamic=dynamic)
    assert options(adapted) == {"cu": True}, adapted.report


def test_causal_window() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        query = ((lens - tokens)[:, None] + torch.arange(tokens))[..., None]
        return ((torch.arange(keys) <= query) & (torch.arange(keys) > query - 5))[:, None]

    assert options(run(attend(mask), *problem(tokens=4).args)) == {"cu": True, "window": 5}


def test_length_only_is_not_causal() -> None:
    assert options(run(attend(less_than), *problem(tokens=3).args)) == {}  # tokens are heads: no mask tells them apart
    adapted = run(attend(less_than), *problem(tokens=70, pages=10).args)
    assert options(adapted) == {"cu": True, "causal": False}


def test_positions_from_a_tensor_are_a_mask() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        mask = torch.arange(key.shape[2]) <= positions[:, :, None]
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask[:, None], enable_gqa=True)

    given = problem(tokens=4)
    positions = torch.tensor([[5, 3, 0, 9], [1, 1, 30, 2], [39, 0, 7, 8]])
    adapted = run(model, *given.args[:4], positions)
    assert options(adapted) == {"cu": True, "causal": False, "mask": True}


def test_padded_prefill_keeps_its_length_as_a_mask() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        query = torch.arange(tokens)[:, None]
        return (torch.arange(keys) <= query) & (torch.arange(keys) < lens[:, None, None, None])

    given = problem(tokens=9)
    lens = torch.tensor([9, 4, 1])
    assert options(run(attend(mask), *given.args[:4], lens)) == {"cu": True, "mask": True}


def test_is_causal_is_aligned_at_the_first_key() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=True)

    assert options(run(model, *problem(tokens=6).args)) == {"cu": True}
    assert options(run(model, *problem(tokens=40).args)) == {"cu": True}


def test_triangular_float_mask() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        return torch.full((tokens, keys), -math.inf).triu(1)

    assert options(run(attend(mask), *problem(tokens=6).args)) == {"cu": True}


def test_triangular_bool_mask() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        return torch.ones(tokens, keys, dtype=torch.bool).tril(diagonal=7)

    assert options(run(attend(mask), *problem(tokens=6).args)) == {"cu": True}


# Masks that come from outside.


@pytest.mark.parametrize("tokens", [1, 5])
def test_given_mask_is_passed_on(tokens: int) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, enable_gqa=True)

    given = problem(tokens=tokens)
    random = torch.Generator().manual_seed(3)
    mask = torch.rand(3, 1, tokens, 40, generator=random) < 0.6
    mask[..., 11] = True
    adapted = run(model, *given.args[:4], mask)
    expected = {"mask": True} if tokens == 1 else {"cu": True, "causal": False, "mask": True}
    assert options(adapted) == expected


def test_causal_buffer_picked_by_position() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        causal = torch.tril(torch.ones(key.shape[2], key.shape[2], dtype=torch.bool))
        mask = causal[lens - 1][:, None, None, :]
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, enable_gqa=True)

    assert options(run(model, *problem().args)) == {}


def test_tree_mask_next_to_a_length() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, tree: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        visible = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None] & tree[:, None]
        return F.scaled_dot_product_attention(q, key, value, attn_mask=visible, enable_gqa=True)

    random = torch.Generator().manual_seed(4)
    tree = torch.rand(3, 4, 40, generator=random) < 0.7
    tree[..., 0] = True
    adapted = run(model, *problem(tokens=4).args, tree)
    assert options(adapted) == {"cu": True, "causal": False, "mask": True}


def test_prefix_that_everyone_sees() -> None:
    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        query = ((lens - tokens)[:, None] + torch.arange(tokens))[..., None]
        positions = torch.arange(keys)
        return (((positions <= query) | (positions < 3)) & (positions < lens[:, None, None]))[:, None]

    assert options(run(attend(mask), *problem(tokens=4).args)) == {"cu": True, "causal": False, "mask": True}


@pytest.mark.parametrize("hide", ["window", "mask"])
def test_pages_that_are_hidden_may_be_padding(hide: str) -> None:
    """Freed pages behind a window, or in front of left padding, are -1 in the table."""

    def mask(lens: Tensor, tokens: int, keys: int) -> Tensor:
        positions = torch.arange(keys)
        first = lens[:, None] - 4 if hide == "window" else lens[:, None] // 2
        return ((positions < lens[:, None]) & (positions >= first))[:, None, None]

    given = problem()
    lens = torch.tensor([40, 30, 21])
    table = given.table.clone()
    table[:, 0] = -1
    adapted = run(attend(mask), *given.args[:3], table, lens)
    assert options(adapted) == ({"window": 4} if hide == "window" else {"mask": True})


def test_is_causal_with_symbolic_sizes() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=True)

    adapted = run(model, *problem(tokens=7).args, dynamic=True)
    assert options(adapted) == {"cu": True}, adapted.report
