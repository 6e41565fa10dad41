"""The specification of the operators, in plain PyTorch, one sequence at a time.

Nothing here is fast and nothing here is clever: every other path is tested against this file, so it has to be
readable as a definition. All arithmetic is done in ``compute_dtype`` (fp32, or fp64 for an oracle).

Definitions:
    * Token ``i`` of a sequence with ``q_len`` query tokens and length ``seq_len`` has position
      ``seq_len - q_len + i``: queries are aligned to the END of the sequence, and the keys of the query tokens are
      already in the cache.
    * logit = ``scale * q.k``; then softcap ``c * tanh(logit / c)``; then ALiBi ``+ slope * (key pos - query pos)``;
      then masking.
    * ``causal``: key pos <= query pos. ``window=W``: key pos > query pos - W, so a causal window holds W keys, the
      current one included. ``chunk=C``: key pos // C == query pos // C. ``mask[t, j]`` True: key position j is visible
      to token t; positions beyond its last column are not visible. All that are given hold at once.
    * A sink logit is neither scaled nor capped; it enters the denominator once per query head and has no value.
    * A stored K or V element times its scale is the value.
    * LSE is the natural logarithm of the whole denominator, sink included.
    * A row with no visible key gives 0 and LSE -inf (the sink's logit, if there is a sink). Rows that ``cu_seqlens_q``
      does not cover are such rows.
    * Bytes of the cache at positions >= seq_len and table entries past the length influence nothing, NaN included. Nor
      does a position that ``window`` or ``chunk`` hides from every token of its sequence: its page may have been freed.
    * A length is at most what its table row holds, ``M * page``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    mask: Tensor | None = None,
    chunk: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of packed query tokens over a paged KV cache.

    Args:
        query: ``[T, Hq, Dqk]``, any strides.
        k_cache: ``[pages, page, Hkv, Dqk]``; any strides; float, fp8 or int8.
        v_cache: ``[pages, page, Hkv, Dv]``; likewise.
        block_table: ``[B, M]`` int32 or int64: page ids of each sequence in order.
        seq_lens: ``[B]`` int32 or int64: keys of each sequence, the query tokens' own included.
        cu_seqlens_q: ``[B + 1]`` int32 or int64: tokens ``cu[b]:cu[b+1]`` belong to sequence b. None: one token per
            sequence (T == B).
        scale: logit scale; None: ``Dqk ** -0.5``.
        alibi_slopes: ``[Hq]``.
        sinks: ``[Hq]``.
        k_scale, v_scale: ``[]`` or ``[1]`` (per tensor), ``[Hkv]`` (per KV head), or ``[pages, page, Hkv]`` (per token
            and head).
        mask: bool ``[T, K]``.
        compute_dtype: dtype of the arithmetic and of both results.

    Returns:
        ``out [T, Hq, Dv]`` and ``lse [T, Hq]``, both in ``compute_dtype``.
    """
    num_tokens, num_q_heads, head_dim = query.shape
    num_kv_heads, v_dim = v_cache.shape[2], v_cache.shape[3]
    group = num_q_heads // num_kv_heads
    logit_scale = head_dim**-0.5 if scale is None else scale

    out = torch.zeros(num_tokens, num_q_heads, v_dim, dtype=compute_dtype, device=query.device)
    lse = torch.full((num_tokens, num_q_heads), -torch.inf, dtype=compute_dtype, device=query.device)
    if sinks is not None:
        lse = sinks.to(compute_dtype).expand(num_tokens, num_q_heads).clone()

    starts = list(range(len(seq_lens) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        q_len = starts[b + 1] - starts[b]
        if q_len <= 0 or seq_len <= 0:
            continue
        key_pos = torch.arange(seq_len, device=query.device)
        query_pos = torch.arange(seq_len - q_len, seq_len, device=query.device)[:, None]
        visible = torch.ones(q_len, seq_len, dtype=torch.bool, device=query.device)
        if causal:
            visible &= key_pos <= query_pos
        if window is not None:
            visible &= query_pos - key_pos < window  # no window is so wide that this overflows
        if chunk is not None:
            visible &= key_pos // chunk == query_pos // chunk
        live = visible.any(dim=0)
        if mask is not None:
            columns = min(seq_len, mask.shape[1])
            visible[:, :columns] &= mask[rows, :columns]
            visible[:, columns:] = False

        key = _gather(k_cache, k_scale, block_table[b], live, compute_dtype).repeat_interleave(group, dim=1)
        value = _gather(v_cache, v_scale, block_table[b], live, compute_dtype).repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", query[rows].to(compute_dtype), key) * logit_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.to(compute_dtype)[:, None, None] * (key_pos - query_pos)
        logits = logits.masked_fill(~visible, -torch.inf)

        highest = logits.amax(dim=-1)
        if sinks is not None:
            highest = torch.maximum(highest, sinks.to(compute_dtype)[:, None])
        # Relative to the highest logit, not to the LSE, which of large logits is rounded: weights are 1 in all. A row
        # that sees nothing has none.
        highest = highest.masked_fill(highest == -torch.inf, 0.0)
        weights = torch.exp(logits - highest[..., None])
        total = weights.sum(dim=-1)
        if sinks is not None:
            total = total + torch.exp(sinks.to(compute_dtype)[:, None] - highest)
        weights = torch.where(visible, weights / total[..., None], 0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value)
        lse[rows] = (highest + torch.log(total)).transpose(0, 1)
    return out, lse


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values into their cache slots, in place.

    Slot ``s`` is page ``s // page``, position ``s % page``. Rows whose slot is negative or beyond the cache are
    skipped; rows of ``key`` beyond the slots are ignored. Rows may lie in a cache themselves: what is written is what
    they held before the call. Which row a slot holds that was given twice is not specified.
    What is stored is ``x / scale``, computed in fp32 (in fp64 when the row or the cache is fp64) and rounded to the
    cache's dtype (int8 to nearest even; fp8 and int8 saturate).

    Args:
        key: ``[T, Hkv, Dqk]``. value: ``[T, Hkv, Dv]``; any float dtype, any strides.
        k_cache, v_cache: as in :func:`paged_attention`.
        slot_mapping: ``[S]`` int32 or int64, S <= T.
        k_scale, v_scale: as in :func:`paged_attention`; a per-token-and-head scale is read at the slot written.
    """
    page_size = k_cache.shape[1]
    num_slots = k_cache.shape[0] * page_size
    key, value = key.clone(), value.clone()
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < num_slots:
            where = (slot // page_size, slot % page_size)
            k_cache[where] = _store(key[token], k_scale, where, k_cache.dtype)
            v_cache[where] = _store(value[token], v_scale, where, v_cache.dtype)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the results over each.

    Args:
        out_a, out_b: ``[T, H, D]``. lse_a, lse_b: ``[T, H]``, natural log; at most one of them may include a sink.
            Where an LSE is -inf, the result is the other part, whatever the ``out`` beside it holds.

    Returns:
        ``out [T, H, D]`` in the dtype of ``out_a`` and ``lse [T, H]`` fp32 (fp64 for fp64 input), both contiguous.

    Source: log-sum-exp of a split softmax (FlashAttention, arXiv:2205.14135, section 3.1).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    largest = torch.maximum(lse_a, lse_b).masked_fill(torch.isneginf(lse), 0.0)
    total = torch.exp(lse_a - largest) + torch.exp(lse_b - largest)
    dtype = torch.promote_types(out_a.dtype, lse.dtype)
    out = torch.zeros_like(out_a, dtype=dtype)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = (torch.exp(part_lse - largest) / total).to(dtype)[..., None]
        out = out + torch.where(torch.isneginf(part_lse)[..., None], 0.0, part.to(dtype) * weight)
    return out.to(out_a.dtype).contiguous(), lse.contiguous()


def _gather(cache: Tensor, scale: Tensor | None, table_row: Tensor, live: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of one sequence, dequantised, ``[seq_len, Hkv, D]``; 0 at the positions that are not ``live``."""
    positions = live.nonzero()[:, 0]
    page = table_row.long()[positions // cache.shape[1]]
    offset = positions % cache.shape[1]
    gathered = torch.zeros(len(live), *cache.shape[2:], dtype=dtype, device=cache.device)
    gathered[positions] = cache[page, offset].to(dtype)
    if scale is None:
        return gathered
    scale = scale.to(dtype)
    if scale.dim() == 3:
        gathered[positions] *= scale[page, offset][..., None]
        return gathered
    return gathered * scale.reshape(-1, 1)


def _store(row: Tensor, scale: Tensor | None, where: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """One token's heads ``[Hkv, D]`` as the cache stores them."""
    row = row.to(torch.float64 if torch.float64 in (row.dtype, dtype) else torch.float32)
    if scale is not None:
        scale = scale.to(row.dtype)
        row = row / (scale[where][:, None] if scale.dim() == 3 else scale.reshape(-1, 1))
    if dtype == torch.int8:
        return row.round().clamp(-128, 127).to(dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return row.clamp(-limit, limit).to(dtype)
    return row.to(dtype)
