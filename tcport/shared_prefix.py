"""Attention of a batch whose sequences begin with the same pages: the common part is read once for all."""

from __future__ import annotations

import torch
from torch import Tensor

from tcport import checks
from tcport.argument_types import stand_in, wrong_type
from tcport.ops import merge_states, paged_attention


def shared_prefix_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    shared_pages: int,
    scale: float | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """What :func:`tcport.paged_attention` gives for a batch with a common prefix, with its keys read once.

    All query tokens attend to the prefix as one sequence, each to the rest of its own, and the two results are merged
    by their log-sum-exp (cascade attention).

    Args:
        query, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q: as in :func:`tcport.paged_attention`; the table
            has the common pages as well.
        shared_pages: the first ``shared_pages`` entries are the same in every row of ``block_table`` that belongs to
            a sequence, and full. No query token lies within them: ``seq_len - q_len >= shared_pages * page``. A
            sequence of length 0 shares nothing and gets zeros.
        scale, causal, softcap, sinks, k_scale, v_scale, return_lse: as in :func:`tcport.paged_attention`. A window,
            chunk, ALiBi or mask reaches into the prefix differently for every token: use the plain function for those.

    Returns:
        As :func:`tcport.paged_attention`.

    Raises:
        TcportError: as :func:`tcport.paged_attention`; an ArgumentError also where ``shared_pages`` is not between 0
            and the columns of the table.
    """
    wrong = wrong_type(
        query=query,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        shared_pages=shared_pages,
        causal=causal,
        sinks=sinks,
        return_lse=return_lse,
    )
    if wrong is not None:
        torch.ops.tcport.refuse_type.default(*wrong)
        return stand_in(query, v_cache, return_lse)
    common = {"scale": scale, "softcap": softcap, "k_scale": k_scale, "v_scale": v_scale, "return_lse": True}
    if not _can_be_taken_apart(query, k_cache, block_table, seq_lens, cu_seqlens_q, shared_pages):
        # Whatever is wrong, one of these refuses it; under Dynamo the backend does, and no result is ever used.
        torch.ops.tcport.check_shared_pages.default(block_table, shared_pages)
        plain = paged_attention(
            query, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, causal=causal, sinks=sinks, **common
        )
        return plain if return_lse else plain[0]
    shared_keys = shared_pages * k_cache.shape[1]
    rest = paged_attention(
        query,
        k_cache,
        v_cache,
        block_table[:, shared_pages:],
        (seq_lens - shared_keys).clamp(min=0),
        cu_seqlens_q,
        causal=causal,
        sinks=sinks,
        **common,
    )
    if shared_pages == 0 or block_table.shape[0] == 0:
        return rest if return_lse else rest[0]

    tokens = torch.arange(query.shape[0], device=query.device)
    live = seq_lens > 0
    if cu_seqlens_q is not None:
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens.to(cu_seqlens_q.dtype), right=True)
        covered = sequence < seq_lens.shape[0]
        live = covered & live[sequence.clamp(max=seq_lens.shape[0] - 1)]
    whole = torch.stack([tokens.new_zeros(()), tokens.new_full((), query.shape[0])]).to(seq_lens.dtype)
    # The table of the prefix comes from a row that has one: padding rows may hold anything.
    owner = (seq_lens > 0).to(torch.int32).argmax().reshape(1)
    prefix, prefix_lse = paged_attention(
        query,
        k_cache,
        v_cache,
        block_table.index_select(0, owner)[:, :shared_pages],
        seq_lens.new_full((1,), shared_keys) * (seq_lens > 0).any(),
        whole,
        causal=False,
        **common,
    )
    prefix_lse = torch.where(live[:, None], prefix_lse, -torch.inf)
    out, lse = merge_states(prefix, prefix_lse, *rest)
    return (out, lse) if return_lse else out


def _can_be_taken_apart(
    query: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    shared_pages: int,
) -> bool:
    """Whether the arguments can be sliced and computed with at all, before any operator has looked at them."""
    ranks = (query.dim(), k_cache.dim(), block_table.dim(), seq_lens.dim()) == (3, 4, 2, 1)
    if not ranks or seq_lens.dtype not in checks.INDEX_DTYPES or seq_lens.device != query.device:
        return False
    if block_table.device != query.device or block_table.shape[0] != seq_lens.shape[0]:
        return False
    if cu_seqlens_q is not None and (cu_seqlens_q.dim() != 1 or cu_seqlens_q.dtype not in checks.INDEX_DTYPES):
        return False
    if cu_seqlens_q is not None and cu_seqlens_q.device != query.device:
        return False
    tokens_match = query.shape[0] == seq_lens.shape[0] if cu_seqlens_q is None else True
    starts_match = True if cu_seqlens_q is None else cu_seqlens_q.shape[0] == seq_lens.shape[0] + 1
    return bool(tokens_match and starts_match and shared_pages >= 0 and shared_pages <= block_table.shape[1])
