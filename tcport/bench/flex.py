"""Paged decode as compiled FlexAttention does it: one flat cache, and a block mask whose blocks are pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


def flex_decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Callable[[], Tensor]:
    """A call that gives attention ``[B, Hq, 1, D]``.

    Args:
        query: ``[B, Hq, D]``. k_cache, v_cache: ``[pages, page, Hkv, D]``; copied once, to the layout it reads best.
        table: ``[B, M]`` int32. lens: ``[B]``, multiples of the page size: pages are then read whole, without a mask.
    """
    pages, page = k_cache.shape[:2]
    key, value = (cache.flatten(0, 1)[None].transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    indices = torch.zeros(len(table), 1, 1, pages, dtype=torch.int32)
    indices[:, 0, 0, : table.shape[1]] = table
    counts = (lens // page).int().view(-1, 1, 1)
    # Inductor's C++ template does not compile without partly visible blocks, or where both kinds share a tensor.
    mask = BlockMask(
        seq_lengths=(1, pages * page),
        kv_num_blocks=counts.new_zeros(counts.shape),
        kv_indices=indices.clone(),
        full_kv_num_blocks=counts,
        full_kv_indices=indices,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(128, page),
        mask_mod=lambda batch, head, query_index, key_index: query_index >= 0,
    )
    compiled = torch.compile(flex_attention)

    def attend() -> Tensor:
        out = compiled(query[:, :, None], key, value, block_mask=mask, enable_gqa=True)
        return out if isinstance(out, Tensor) else out[0]

    return attend
