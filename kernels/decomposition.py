"""Paged attention and the cache write in plain PyTorch operations: the last link of the chain.

:func:`paged_attention` and :func:`kv_write` can be traced with symbolic sizes: no shape depends on data, no value is
read on the host, and no Python branch looks at a size that a graph may leave open. Meanings are those of
:mod:`tcport.kernels.reference`; arithmetic is fp32, or fp64 for an fp64 query.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tcport.kernels import contraction
from tcport.kernels.call import AttentionCall
from tcport.kernels.contraction import Contraction
from tcport.kernels.decomposed_write import kv_write as kv_write


@dataclasses.dataclass(frozen=True)
class Rows:
    """What each query token must know of its sequence.

    Attributes:
        table: ``[T, M]`` page ids, or ``[1, M]`` when all tokens share one sequence. Entries may be garbage.
        length: ``[T]`` keys of the sequence; 0 for a token that belongs to none.
        position: ``[T]`` position of the token in its sequence.
    """

    table: Tensor
    length: Tensor
    position: Tensor


def paged_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention of packed query tokens over a paged cache, for compiled code.

    Scores take ``T x Hq x M x page`` numbers; keys and values are read in place.

    Returns:
        ``out [T, Hq, Dv]`` in the query's dtype, contiguous, and ``lse [T, Hq]`` fp32, or ``[0]`` without
        ``return_lse``.
    """
    if call.cu_seqlens_q is not None and _is(call.seq_lens.shape[0], 1):
        return attend(call, rows_of(call), contraction.SEQUENCE)
    return attend(call, rows_of(call), contraction.FUSED)


def rows_of(call: AttentionCall) -> Rows:
    """Sequence, length and position of every query token, computed on the device."""
    if call.cu_seqlens_q is None:
        return Rows(call.block_table, call.seq_lens, call.seq_lens - 1)
    if _is(call.seq_lens.shape[0], 0):
        nothing = call.cu_seqlens_q.new_zeros(call.query.shape[0])
        return Rows(call.block_table.new_zeros(1, 0), nothing, nothing)
    token = torch.arange(call.query.shape[0], device=call.query.device)
    start, end = call.cu_seqlens_q[:-1], call.cu_seqlens_q[1:]
    member = (token[:, None] >= start) & (token[:, None] < end)
    sequence = (member * torch.arange(start.shape[0], device=token.device)).sum(1)
    length = call.seq_lens[sequence]
    table = call.block_table if _is(start.shape[0], 1) else call.block_table[sequence]
    return Rows(table, torch.where(member.any(1), length, 0), length - end[sequence] + token)


def attend(call: AttentionCall, rows: Rows, contract: Contraction) -> tuple[Tensor, Tensor]:
    """Attention of the call's query tokens, which ``rows`` describes; results as :func:`paged_attention`."""
    num_tokens, num_q_heads, head_dim = call.query.shape
    num_pages, page_size, num_kv_heads, v_dim = call.v_cache.shape
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    grouped = (num_tokens, num_kv_heads, num_q_heads // num_kv_heads)
    sinks = None if call.sinks is None else call.sinks.to(dtype).view(grouped[1:])
    num_keys = rows.table.shape[1] * page_size
    if _is(num_keys, 0) or _is(num_pages, 0) or _is(num_tokens, 0):
        lse = call.query.new_full(grouped, -torch.inf, dtype=dtype) if sinks is None else sinks.expand(grouped)
        return _results(call, call.query.new_zeros(*grouped, v_dim, dtype=dtype), lse)

    key_pos = torch.arange(num_keys, device=call.query.device)
    # Entries past the length may hold anything: such a page is read from inside the cache, and then not used.
    page = rows.table.clamp(0, num_pages - 1)[:, key_pos // page_size]
    offset = key_pos % page_size
    visible = _visible(call, rows, key_pos)
    shown = visible[:, None, None]

    query = call.query.to(dtype).view(*grouped, head_dim)
    scores = contract.scores(query, call.k_cache, page, offset) * call.scale
    if call.k_scale is not None:
        scores = scores * _kv_scale(call.k_scale, page, offset, dtype)
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        distance = key_pos - rows.position[:, None]
        scores = scores + call.alibi_slopes.to(dtype).view(*grouped[1:], 1) * distance[:, None, None]
    scores = torch.where(shown, scores, -torch.inf)

    highest = scores.amax(dim=-1) if sinks is None else torch.maximum(scores.amax(dim=-1), sinks)
    # Relative to the highest, not to the LSE, which of large scores is rounded. A row that sees nothing has none.
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(scores - highest[..., None])
    total = weights.sum(dim=-1) if sinks is None else weights.sum(dim=-1) + torch.exp(sinks - highest)
    lse = highest + torch.log(total)
    weights = weights / total[..., None]
    if call.v_scale is not None:
        weights = weights * _kv_scale(call.v_scale, page, offset, dtype)
    weights = torch.where(shown, weights, 0.0)
    return _results(call, contract.mix(weights, call.v_cache, page, offset, visible), lse)


def _visible(call: AttentionCall, rows: Rows, key_pos: Tensor) -> Tensor:
    """``[T, L]``: which key positions each token sees."""
    query_pos = rows.position[:, None]
    visible = key_pos < rows.length[:, None]
    if call.causal:
        visible = visible & (key_pos <= query_pos)
    if call.window is not None:
        visible = visible & (key_pos > query_pos - call.window)
    if call.chunk is not None:
        visible = visible & (key_pos // call.chunk == query_pos // call.chunk)
    if call.mask is not None:
        columns = call.mask.shape[1]
        if _is(columns, 0):
            return torch.zeros_like(visible)
        visible = visible & (key_pos < columns) & call.mask[:, key_pos.clamp(max=columns - 1)]
    return visible


def _kv_scale(scale: Tensor, page: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale in any of its forms, to multiply ``[T, Hkv, G, L]``.

    It does not depend on the position within a head, so it multiplies scores and weights, not keys and values.
    """
    scale = scale.to(dtype)
    if scale.dim() == 3:
        return scale[page, offset].transpose(1, 2)[:, :, None]
    return scale.reshape(-1, 1, 1)


def _results(call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out = out.flatten(1, 2).to(call.query.dtype).contiguous()
    return out, lse.flatten(1, 2).float().contiguous() if call.return_lse else lse.new_empty(0, dtype=torch.float32)


def _is(size: int | torch.SymInt, number: int) -> bool:
    """Whether a size is known to be ``number``; asking this of an open size leaves it open."""
    return isinstance(size, int) and size == number
