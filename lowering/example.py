"""Real tensors for a call of which only the sizes are known: every page is one of the cache's, every context full."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tcport.kernels.call import AttentionCall, MergeCall, WriteAndAttendCall, WriteCall
from tcport.lowering.operators import tensors_of

CACHE_BYTES = 1 << 30
"""The most memory for either cache: what serves is there beside it, and holds a cache of full size."""


def example(call: Any, *, v_is_view_of_k: bool = False) -> Any | None:
    """A call of the same sizes, dtypes and strides, its caches cut to fewer pages where they are large.

    Args:
        call: a call of an operator of tcport's on fake tensors.
        v_is_view_of_k: whether its V is the first components of K, in the same memory.

    Returns:
        None where a size is not known, and for operators of other libraries.
    """
    sizes = [size for tensor in tensors_of(call) for size in (*tensor.shape, *tensor.stride())]
    if not isinstance(call, (AttentionCall, WriteCall, WriteAndAttendCall, MergeCall)):
        return None
    if not all(isinstance(size, int) for size in sizes):
        return None
    if isinstance(call, MergeCall):
        return MergeCall(*map(_noise, (call.out_a, call.lse_a, call.out_b, call.lse_b)))
    k_cache = _cache(call.k_cache)
    v_cache = k_cache[..., : call.v_cache.shape[3]] if v_is_view_of_k else _cache(call.v_cache)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    if isinstance(call, WriteAndAttendCall):
        return WriteAndAttendCall(_write(call.write, caches), _attention(call.attend, caches))
    return _write(call, caches) if isinstance(call, WriteCall) else _attention(call, caches)


def _attention(call: AttentionCall, caches: dict[str, Tensor]) -> AttentionCall:
    pages, page = caches["k_cache"].shape[:2]
    sequences, width = call.block_table.shape
    lens = torch.full_like(_empty(call.seq_lens), width * page)
    bounds = None
    if call.cu_seqlens_q is not None:
        evenly = torch.arange(sequences + 1, device=lens.device) * call.query.shape[0] // max(sequences, 1)
        bounds = evenly.to(call.cu_seqlens_q.dtype)
    return dataclasses.replace(
        call,
        **caches,
        query=_noise(call.query),
        block_table=_counting(call.block_table, pages),
        seq_lens=lens,
        cu_seqlens_q=bounds,
        mask=None if call.mask is None else _empty(call.mask).fill_(True),
        **_optional(call, ("alibi_slopes", "sinks", "k_scale", "v_scale")),
    )


def _write(call: WriteCall, caches: dict[str, Tensor]) -> WriteCall:
    pages, page = caches["k_cache"].shape[:2]
    return dataclasses.replace(
        call,
        **caches,
        key=_noise(call.key),
        value=_noise(call.value),
        slot_mapping=_counting(call.slot_mapping, pages * page),
        **_optional(call, ("k_scale", "v_scale")),
    )


def _cache(cache: Tensor) -> Tensor:
    page_bytes = max(cache.stride(0), 1) * cache.element_size()
    pages = min(cache.shape[0], max(1, CACHE_BYTES // page_bytes))
    return _noise(cache, (pages, *cache.shape[1:]))


def _noise(like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Unit-normal numbers: zeros would flatter a kernel, as they toggle no wires."""
    shape = shape or tuple(like.shape)
    generator = torch.Generator(like.device).manual_seed(0)
    numbers = torch.randn(shape, generator=generator, device=like.device, dtype=torch.float16)
    return torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device).copy_(numbers)


def _counting(like: Tensor, limit: int) -> Tensor:
    numbers = torch.arange(like.numel(), device=like.device) % max(limit, 1)
    return _empty(like).copy_(numbers.reshape(like.shape))


def _optional(call: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    given = {name: getattr(call, name) for name in names}
    return {name: torch.ones_like(_empty(t)) for name, t in given.items() if t is not None}


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
