"""The cache write in plain PyTorch operations, without data-dependent shapes and without a copy of the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.kernels.call import WriteCall


def kv_write(call: WriteCall) -> None:
    """Write new keys and values into their slots, in place; meanings as :func:`tcport.kernels.reference.kv_write`.

    A row that must not be written cannot be dropped, because the number of rows would then depend on data. It writes
    what some row with a valid slot writes, to the same slot: the order of the two does not matter. When no row has a
    valid slot, all write to the first slot what is there already.
    """
    num_pages, page_size = call.k_cache.shape[:2]
    num_slots = call.slot_mapping.shape[0]
    if any(isinstance(size, int) and size == 0 for size in (num_pages, num_slots)):
        return
    slots = call.slot_mapping.long()
    valid = (slots >= 0) & (slots < num_pages * page_size)
    some_valid = valid.any()
    row = torch.where(valid, torch.arange(num_slots, device=slots.device), valid.int().argmax())
    slot = torch.where(some_valid, slots[row], 0)
    page, offset = slot // page_size, slot % page_size
    for new, cache, scale in (
        (call.key, call.k_cache, call.k_scale),
        (call.value, call.v_cache, call.v_scale),
    ):
        stored = _store(new[row], scale, page, offset, cache.dtype)
        cache.index_put_((page, offset), _select(some_valid, stored, cache[page, offset]))


def _store(rows: Tensor, scale: Tensor | None, page: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``[S, Hkv, D]`` as the cache stores them."""
    rows = rows.to(torch.float64 if torch.float64 in (rows.dtype, dtype) else torch.float32)
    if scale is not None:
        scale = scale.to(rows.dtype)
        rows = rows / (scale[page, offset][..., None] if scale.dim() == 3 else scale.reshape(-1, 1))
    if dtype == torch.int8:
        return rows.round().clamp(-128, 127).to(dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return rows.clamp(-limit, limit).to(dtype)
    return rows.to(dtype)


def _select(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``torch.where`` on bits: it has no fp8 kernels, and a NaN must keep its payload."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.where(condition, a.view(bits), b.view(bits)).view(a.dtype)
