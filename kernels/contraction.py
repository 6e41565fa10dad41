"""The two sums of attention over a paged cache, ``q.k`` and ``weights.v``, in the three ways PyTorch can take them.

Shapes: ``query [T, Hkv, G, D]`` and ``weights [T, Hkv, G, L]`` in the dtype of the arithmetic, ``cache
[pages, page, Hkv, D]``, ``page [R, L]`` and ``offset [L]`` the place of each key position, ``visible [T, L]``. Scores
are ``[T, Hkv, G, L]``, results ``[T, Hkv, G, D]``. A value at a position that is not visible may be NaN and is replaced
by 0, since 0 * NaN is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Contraction:
    """``scores(query, cache, page, offset)`` and ``mix(weights, cache, page, offset, visible)``."""

    scores: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    mix: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _fused_scores(query: Tensor, cache: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    keys = cache[page, offset].to(query.dtype).transpose(1, 2)
    return (query[:, :, :, None] * keys[:, :, None]).sum(-1)


def _fused_mix(weights: Tensor, cache: Tensor, page: Tensor, offset: Tensor, visible: Tensor) -> Tensor:
    weights, visible = _stored(weights), _stored(visible)
    values = cache[page, offset].to(weights.dtype).transpose(1, 2)
    products = weights[..., None] * values[:, :, None]
    return torch.where(visible[:, None, None, :, None], products, 0.0).sum(-2)


def _stored(x: Tensor) -> Tensor:
    """``x``, which Inductor must keep in memory, as it does for every input of ``as_strided``.

    It would otherwise inline the softmax into the product with V, and then store that product
    (``[T, Hkv, G, L, D]``) because it has grown too large to be inlined into the sum.
    """
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def _rows_scores(query: Tensor, cache: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    keys = cache[page, offset].to(query.dtype)
    return query @ keys.permute(0, 2, 3, 1)


def _rows_mix(weights: Tensor, cache: Tensor, page: Tensor, offset: Tensor, visible: Tensor) -> Tensor:
    values = cache[page, offset].to(weights.dtype)
    return weights @ torch.where(visible[:, :, None, None], values, 0.0).transpose(1, 2)


def _sequence_scores(query: Tensor, cache: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    num_tokens, num_kv_heads, group, _ = query.shape
    keys = cache[page[0], offset].to(query.dtype)
    scores = query.transpose(0, 1).flatten(1, 2) @ keys.permute(1, 2, 0)
    return scores.view(num_kv_heads, num_tokens, group, keys.shape[0]).transpose(0, 1)


def _sequence_mix(weights: Tensor, cache: Tensor, page: Tensor, offset: Tensor, visible: Tensor) -> Tensor:
    num_tokens, num_kv_heads, group, _ = weights.shape
    values = cache[page[0], offset].to(weights.dtype)
    values = torch.where(visible.any(0)[:, None, None], values, 0.0)
    result = weights.transpose(0, 1).flatten(1, 2) @ values.transpose(0, 1)
    return result.view(num_kv_heads, num_tokens, group, values.shape[2]).transpose(0, 1)


FUSED = Contraction(_fused_scores, _fused_mix)
"""Products and sums, for compiled code: Inductor reads the cache inside the reduction and stores no gathered copy."""

ROWS = Contraction(_rows_scores, _rows_mix)
"""Each token gathers keys of its own and multiplies matrices: for uncompiled code, where a product would be stored."""

SEQUENCE = Contraction(_sequence_scores, _sequence_mix)
"""All tokens belong to one sequence (``page [1, L]``): its keys are gathered once, for one matrix product per head."""
