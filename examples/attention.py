"""Attention over a paged KV cache, twice: as one writes it in PyTorch, and as a call of tcport's operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tcport


@dataclasses.dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass lie: ``S`` new tokens of each of ``B`` sequences.

    Attributes:
        block_table: ``[B, M]`` int32, page ids of each sequence in order.
        page, offset: ``[B, S]``, the cache slot of each new token.
        seq_lens: ``[B]`` int32, keys of each sequence, the new tokens included.
        visible: bool, broadcasts to ``[B, 1, S, M * page size]``: True where a token sees a key.
        cu_seqlens_q: ``[B + 1]`` int32, or None when S is 1.
    """

    block_table: Tensor
    page: Tensor
    offset: Tensor
    seq_lens: Tensor
    visible: Tensor
    cu_seqlens_q: Tensor | None


Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Step], Tensor]
"""``(query [B, S, Hq, D], key and value [B, S, Hkv, D], k_cache and v_cache [pages, page, Hkv, D], step)``
to the shape of ``query``."""


def torch_attention(query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> Tensor:
    """Write the new keys and values, gather each sequence through the block table, mask what lies beyond it."""
    k_cache[step.page, step.offset] = key
    v_cache[step.page, step.offset] = value
    keys = k_cache[step.block_table].flatten(1, 2)
    values = v_cache[step.block_table].flatten(1, 2)
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=step.visible,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


def canonical_attention(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step
) -> Tensor:
    """The same in tcport's own operators, which also run without ``torch.compile``."""
    slots = step.page * k_cache.shape[1] + step.offset
    tcport.kv_write(key.flatten(0, 1), value.flatten(0, 1), k_cache, v_cache, slots.flatten())
    out = tcport.paged_attention(
        query.flatten(0, 1), k_cache, v_cache, step.block_table, step.seq_lens, step.cu_seqlens_q
    )
    return cast("Tensor", out).view_as(query)  # a pair only with return_lse=True


SPELLINGS: dict[str, Attention] = {"torch": torch_attention, "canonical": canonical_attention}
