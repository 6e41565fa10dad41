"""Bounds of a mask that may lie past the gathered keys: PyTorch cuts the mask there, and so must the canonical call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import Adapted, problem, run
from torch import Tensor

PAGED = torch.ops.tcport.paged_attention.default
CAPACITY = 16
LENS = torch.tensor([0, 1, CAPACITY - 1, CAPACITY])
Bound = Callable[[Tensor, int, int], Tensor]
"""From lens ``[B]``, a number of tokens S and an offset to the last position that a token sees, ``[B, S, 1]``."""
Mask = Callable[[Tensor, Tensor], Tensor]
"""From key positions and the bound to what is visible, ``[B, S, keys]``."""


def own(lens: Tensor, tokens: int, offset: int) -> Tensor:
    return (lens[:, None] - tokens + torch.arange(tokens) + offset)[..., None]


def context(lens: Tensor, tokens: int, offset: int) -> Tensor:
    return (lens[:, None] + torch.arange(tokens) + offset)[..., None]


def smaller(lens: Tensor, tokens: int, offset: int) -> Tensor:
    return own(torch.minimum(lens + offset, lens * 2 + 1), tokens, 0)


def in_table(lens: Tensor, tokens: int, offset: int) -> Tensor:
    return own((lens + offset).clamp(max=CAPACITY), tokens, 0)


def at_least_one(lens: Tensor, tokens: int, offset: int) -> Tensor:
    return own((lens + offset).clamp(min=1), tokens, 0)


def between_starts(lens: Tensor, tokens: int, offset: int) -> Tensor:
    starts = F.pad(lens.cumsum(0), (1, 0))
    return own(starts[1:] - starts[:-1], tokens, offset)


def of_each_token(lens: Tensor, tokens: int, offset: int) -> Tensor:
    return torch.minimum(context(lens, tokens, offset), lens[:, None, None] + 1)


BOUNDS: list[Bound] = [own, context, smaller, in_table, at_least_one, between_starts, of_each_token]
MASKS: dict[str, Mask] = {
    "causal": lambda keys, last: keys <= last,
    "window": lambda keys, last: (keys <= last) & (keys > last - 5),
    "chunk": lambda keys, last: (keys <= last) & (keys // 6 == last // 6),
}


def attended(bound: Bound, mask: Mask, tokens: int, offset: int, dynamic: bool = False, cut: int = CAPACITY) -> Adapted:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2)[:, :cut].transpose(1, 2) for cache in (k_cache, v_cache))
        visible = mask(torch.arange(key.shape[2]), bound(lens, q.shape[2], offset))
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=visible[:, None], enable_gqa=True)
        return out.nan_to_num()  # a token that sees no key: zeros here, NaN in some of PyTorch's kernels

    given = problem(batch=len(LENS), tokens=tokens, pages=2, page=8)
    return run(model, *given.args[:4], LENS, dynamic=dynamic)


def options(adapted: Adapted) -> set[str]:
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report
    (node,) = adapted.calls(PAGED)
    return set(node.kwargs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("offset", [-1, 1, 2])
def test_offset(offset: int, tokens: int, mask: str, dynamic: bool) -> None:
    options(attended(own, MASKS[mask], tokens, offset, dynamic))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.__name__)
def test_spelling(bound: Bound, tokens: int, mask: str) -> None:
    for offset in (0, 2):
        options(attended(bound, MASKS[mask], tokens, offset))


@pytest.mark.parametrize("cut", [7, 8, 13])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_cut_short_of_the_table(tokens: int, mask: str, cut: int) -> None:
    """The table has room for the length; the gathered keys have not."""
    options(attended(own, MASKS[mask], tokens, 0, cut=cut))


@pytest.mark.parametrize(("mask", "expected"), [("causal", set()), ("window", {"window"}), ("chunk", {"chunk"})])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("bound", [own, in_table], ids=lambda bound: bound.__name__)
def test_end_within_the_table_needs_no_mask(bound: Bound, tokens: int, mask: str, expected: set[str]) -> None:
    assert options(attended(bound, MASKS[mask], tokens, -1)) == expected


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("beyond", "expected"), [(False, {"window"}), (True, {"causal", "mask"})])
def test_page_of_the_last_token_shows_that_it_has_room(beyond: bool, expected: set[str], dynamic: bool) -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, start: Tensor, k: Tensor) -> Tensor:
        positions = start[:, None] + torch.arange(q.shape[2])
        k_cache[table.gather(1, positions // 8), positions % 8] = k
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        visible = MASKS["window"](torch.arange(key.shape[2]), (positions + 1 if beyond else positions)[..., None])
        return F.scaled_dot_product_attention(q, key, value, attn_mask=visible[:, None], enable_gqa=True)

    given = problem(batch=4, tokens=3, pages=2, page=8)
    start = torch.tensor([0, 1, CAPACITY - 4, CAPACITY - 3])
    adapted = run(model, *given.args[:3], given.table.long(), start, given.k, dynamic=dynamic)
    (node,) = adapted.calls(PAGED)
    assert set(node.kwargs) == expected


def test_length_that_is_raised_in_place_may_pass_the_table() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        lens.bitwise_or_(16)
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        visible = MASKS["causal"](torch.arange(key.shape[2]), own(lens, q.shape[2], 0))
        return F.scaled_dot_product_attention(q, key, value, attn_mask=visible[:, None], enable_gqa=True)

    given = problem(batch=len(LENS), tokens=3, pages=2, page=8)
    assert "mask" in options(run(model, *given.args[:4], LENS))


@pytest.mark.parametrize(
    ("dtype", "given", "end"),
    [
        (torch.uint8, [0, 1, 15, 16], lambda lens: lens - 1),
        (torch.uint8, [0, 1, 15, 250], lambda lens: lens + 10),
        (torch.int8, [0, 1, 10, 16], lambda lens: lens * 8),
        (torch.int16, [0, 1, 4, 16], lambda lens: lens * 4096),
        (torch.int64, [0, 1, 15, 65536 + 3], lambda lens: lens.short()),
        (torch.int64, [0, 1, 15, 256 + 3], lambda lens: lens.to(torch.int8).long()),
    ],
    ids=["uint8 below 0", "uint8 past 255", "int8 past 127", "int16 past 32767", "cut to int16", "cut to int8"],
)
def test_integers_that_wrap_around(dtype: torch.dtype, given: list[int], end: Callable[[Tensor], Tensor]) -> None:
    """A length computed in 8 or 16 bits is what those bits hold, before and after it is put together with others."""

    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        visible = torch.arange(key.shape[2]) <= end(lens)[:, None]
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=visible[:, None, None], enable_gqa=True)
        return out.nan_to_num()  # zeros where no key is seen, NaN in some of PyTorch's kernels

    problems = problem(batch=4, pages=2, page=8)
    options(run(model, *problems.args[:4], torch.tensor(given, dtype=dtype)))
