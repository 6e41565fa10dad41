"""A call without data that compiles to what any call of a spec compiles to."""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.ir import AttentionSpec, Dim, KVLayout
from tcport.kernels.call import AttentionCall

_SEQS, _TOKENS, _PAGES = 4, 64, 8
_COLUMNS = 2**16  # of the block table: a context so long that nothing is left out for short ones


def attention_call(spec: AttentionSpec) -> AttentionCall:
    """A call on meta tensors that compiles to what any call of this spec compiles to.

    Sizes that kernels do not specialise on (sequences, tokens, table width) are placeholders.
    """
    tokens = _SEQS if spec.form == "decode" else _TOKENS

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query = empty(tokens, spec.num_q_heads, spec.head_dim_qk, dtype=_dtype(spec.query_dtype))
    k_cache = _cache(spec, spec.k_layout, spec.head_dim_qk)
    v_cache = _cache(spec, spec.v_layout, spec.head_dim_v)
    if spec.v_is_view_of_k:
        v_cache = k_cache[..., : spec.head_dim_v]
    columns = _PAGES * spec.k_layout.page_size
    return AttentionCall.of(
        query,
        k_cache,
        v_cache,
        empty(_SEQS, _COLUMNS, dtype=torch.int32),
        empty(_SEQS, dtype=torch.int32),
        None if spec.form == "decode" else empty(_SEQS + 1, dtype=torch.int32),
        causal=spec.causal,
        window=1024 if spec.window else None,
        chunk=1024 if spec.chunk else None,
        softcap=30.0 if spec.softcap else 0.0,
        alibi_slopes=empty(spec.num_q_heads) if spec.alibi else None,
        sinks=empty(spec.num_q_heads) if spec.sinks else None,
        k_scale=empty(1) if spec.kv_scales else None,
        v_scale=empty(1) if spec.kv_scales else None,
        mask=empty(tokens, columns, dtype=torch.bool) if spec.mask else None,
        num_splits=spec.num_splits,
        batch_invariant=spec.batch_invariant,
        return_lse=spec.return_lse,
    )


def _cache(spec: AttentionSpec, layout: KVLayout, dim: int) -> Tensor:
    page, heads = layout.page_size, spec.num_kv_heads
    usual = (page * heads * dim, heads * dim, dim, 1)
    given = (layout.stride_page, layout.stride_token, layout.stride_head, layout.stride_dim)
    strides = tuple(_size(stride, default) for stride, default in zip(given, usual, strict=True))
    return torch.empty_strided((_PAGES, page, heads, dim), strides, dtype=_dtype(spec.kv_dtype), device="meta")


def _size(size: Dim, placeholder: int) -> int:
    return size if isinstance(size, int) else placeholder


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))
