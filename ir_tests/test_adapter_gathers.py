"""Every spelling of the gather of K and V, in front of ``scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import problem, run
from torch import Tensor

Gather = Callable[[Tensor, Tensor], Tensor]
"""From a cache ``[N, P, H, D]`` and a table ``[B, M]`` to ``[B, H, M * P, D]``."""


def indexing_reshape(cache: Tensor, table: Tensor) -> Tensor:
    (batch, columns), (_, page, heads, dim) = table.shape, cache.shape
    return cache[table].reshape(batch, columns * page, heads, dim).transpose(1, 2)


def indexing_flatten(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table.long()].flatten(1, 2).transpose(1, 2)


def indexing_permute(cache: Tensor, table: Tensor) -> Tensor:
    (batch, columns), (_, page, heads, dim) = table.shape, cache.shape
    return cache[table].permute(0, 3, 1, 2, 4).contiguous().view(batch, heads, columns * page, dim)


def indexing_all_dims(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table, :, :, :].flatten(1, 2).movedim(2, 1)


def index_select_function(cache: Tensor, table: Tensor) -> Tensor:
    (batch, columns), (_, page, heads, dim) = table.shape, cache.shape
    picked = torch.index_select(cache, 0, table.flatten())
    return picked.view(batch, columns * page, heads, dim).permute(0, 2, 1, 3)


def index_select_method(cache: Tensor, table: Tensor) -> Tensor:
    (batch, columns), (_, _page, heads, dim) = table.shape, cache.shape
    picked = cache.index_select(0, table.reshape(-1)).unflatten(0, (batch, columns))
    return picked.reshape(batch, -1, heads, dim).swapaxes(1, 2)


def token_indices(cache: Tensor, table: Tensor) -> Tensor:
    _, page, heads, dim = cache.shape
    index = (table[:, :, None] * page + torch.arange(page)).flatten(1)
    return cache.view(-1, heads, dim)[index.long()].transpose(1, 2)


def token_indices_by_position(cache: Tensor, table: Tensor) -> Tensor:
    _, page, _heads, _dim = cache.shape
    positions = torch.arange(table.shape[1] * page)
    slots = table[:, positions // page] * page + positions % page
    return cache.flatten(0, 1)[slots].transpose(1, 2)


def token_indices_by_bits(cache: Tensor, table: Tensor) -> Tensor:
    _, _, heads, dim = cache.shape
    positions = torch.arange(table.shape[1] * 8)
    slots = torch.index_select(table, 1, positions >> 3) * 8 + (positions & 7)
    return cache.reshape(-1, heads, dim)[slots].transpose(1, 2)


def page_and_offset(cache: Tensor, table: Tensor) -> Tensor:
    page = cache.shape[1]
    positions = torch.arange(table.shape[1] * page)
    rows = table.gather(1, (positions // page).expand(table.shape[0], -1))
    return cache[rows, (positions % page)[None]].transpose(1, 2)


def embedding(cache: Tensor, table: Tensor) -> Tensor:
    (batch, columns), (pages, page, heads, dim) = table.shape, cache.shape
    rows = F.embedding(table, cache.view(pages, page * heads * dim))
    return rows.view(batch, columns * page, heads, dim).transpose(1, 2)


def one_row_at_a_time(cache: Tensor, table: Tensor) -> Tensor:
    (batch, columns), (_pages, page, heads, dim) = table.shape, cache.shape
    index = table.long().view(-1, 1, 1, 1).expand(-1, page, heads, dim)
    return cache.gather(0, index).view(batch, columns * page, heads, dim).transpose(1, 2)


def head_first(cache: Tensor, table: Tensor) -> Tensor:
    by_head = cache.permute(2, 0, 1, 3)  # [H, N, P, D]
    return by_head[:, table].permute(1, 0, 2, 3, 4).flatten(2, 3)


def take_along(cache: Tensor, table: Tensor) -> Tensor:
    (batch, columns), (pages, page, heads, dim) = table.shape, cache.shape
    flat = cache.reshape(pages, -1)
    rows = torch.take_along_dim(flat, table.long().reshape(-1, 1), dim=0)
    return rows.reshape(batch, columns * page, heads, dim).mT.mT.transpose(1, 2)


GATHERS: list[Gather] = [
    indexing_reshape,
    indexing_flatten,
    indexing_permute,
    indexing_all_dims,
    index_select_function,
    index_select_method,
    token_indices,
    token_indices_by_position,
    token_indices_by_bits,
    page_and_offset,
    embedding,
    one_row_at_a_time,
    head_first,
    take_along,
]


def attend(gather: Gather) -> Callable[..., Tensor]:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = gather(k_cache, table), gather(v_cache, table)
        mask = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, enable_gqa=True)

    return model


@pytest.mark.parametrize("gather", GATHERS, ids=lambda g: g.__name__)
def test_gather(gather: Gather) -> None:
    adapted = run(attend(gather), *problem().args)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report
    assert not adapted.rules


SYMBOLIC = [indexing_reshape, index_select_method, token_indices_by_position, token_indices_by_bits, embedding]


@pytest.mark.parametrize("gather", SYMBOLIC, ids=lambda g: g.__name__)
def test_gather_with_symbolic_sizes(gather: Gather) -> None:
    adapted = run(attend(gather), *problem().args, dynamic=True)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


@pytest.mark.parametrize("page", [lambda entry: entry - 1, lambda entry: entry + 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_page_ids_that_count_from_another_page(page: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    """As where entry 0 stands for no page: ``cache[table - 1]``; or page 0 is kept free: ``cache[table + 1]``."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return attend(indexing_flatten)(q, k_cache, v_cache, page(table), lens)

    given = problem()
    adapted = run(model, *given.args[:3], given.table % 9 + 2, given.lens, dynamic=dynamic)
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report


@pytest.mark.parametrize("step", [2, 9])
def test_page_ids_that_may_count_from_the_end(step: int) -> None:
    """``cache[table - 9]`` of nine pages counts from the end in PyTorch."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return attend(indexing_flatten)(q, k_cache, v_cache, table - step, lens)

    given = problem()
    adapted = run(model, *given.args[:3], given.table % 9, given.lens)
    assert (adapted.kinds, adapted.rules) == ([], ["layout"]), adapted.report


@pytest.mark.parametrize(("first", "other"), [(-1, -2), (-2, -1), (-1, 1)])
def test_keys_and_values_whose_ids_count_from_different_pages(first: int, other: int) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = indexing_flatten(k_cache, table + first), indexing_flatten(v_cache, table + other)
        mask = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, enable_gqa=True)

    given = problem()
    adapted = run(model, *given.args[:3], given.table % 9 + 2, given.lens)
    assert (adapted.kinds, adapted.rules) == ([], ["layout"]), adapted.report
