"""Calls without data that compile to what any call of a spec compiles to."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tcport.kernels.call import AttentionCall, WriteCall
from tcport.tiling.example import attention_call
from tcport.tiling.wire import spec_of


def example_call(op: str, spec: dict[str, Any], index_dtype: str = "int32") -> AttentionCall | WriteCall:
    """A call on meta tensors.

    Args:
        op: ``"paged_attention"`` or ``"kv_write"``.
        spec: of the attention; a write is the one that fills its cache.
        index_dtype: of block table, lengths and query bounds. Slots are int64.
    """
    call = attention_call(spec_of(spec))
    indices = {name: getattr(call, name) for name in ("block_table", "seq_lens", "cu_seqlens_q")}
    dtype = getattr(torch, index_dtype)
    call = dataclasses.replace(call, **{name: x if x is None else x.to(dtype) for name, x in indices.items()})
    if op == "paged_attention":
        return call
    tokens, heads = call.query.shape[0], call.k_cache.shape[2]
    key = torch.empty(tokens, heads, call.k_cache.shape[3], dtype=call.query.dtype, device="meta")
    value = torch.empty(tokens, heads, call.v_cache.shape[3], dtype=call.query.dtype, device="meta")
    slots = torch.empty(tokens, dtype=torch.int64, device="meta")
    return WriteCall(key, value, call.k_cache, call.v_cache, slots, call.k_scale, call.v_scale)
