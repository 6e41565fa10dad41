"""The decomposition outside compiled code: one block of query tokens at a time, so that memory stays bounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from tcport.kernels import contraction
from tcport.kernels.call import AttentionCall
from tcport.kernels.decomposition import Rows, attend, rows_of

BLOCK_NUMBERS = 1 << 25
"""Numbers a block may hold in scores, or in gathered keys and values, at a time: 128 MiB in fp32."""


def paged_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention of packed query tokens over a paged cache, uncompiled; results as the decomposition's.

    On a CPU, and for a batch-invariant call, the lengths are read, and each sequence is computed alone and costs what
    it holds. Elsewhere reading them would wait for the device (and break graph capture), so every token pays for the
    width of the block table.
    """
    num_tokens, num_q_heads, _ = call.query.shape
    out = call.query.new_zeros(num_tokens, num_q_heads, call.v_cache.shape[3])
    lse = call.query.new_full((num_tokens, num_q_heads), -torch.inf, dtype=torch.float32)
    if call.sinks is not None:
        lse = call.sinks.float().expand(num_tokens, -1).clone()
    alone = call.query.device.type == "cpu" or call.batch_invariant
    for tokens, rows in _sequence_blocks(call) if alone else _token_blocks(call):
        mask = None if call.mask is None else call.mask[tokens]
        block = dataclasses.replace(call, query=call.query[tokens], mask=mask, return_lse=True)
        contract = contraction.SEQUENCE if rows.table.shape[0] == 1 else contraction.ROWS
        out[tokens], lse[tokens] = attend(block, rows, contract)
    return out, lse if call.return_lse else lse.new_empty(0)


def _sequence_blocks(call: AttentionCall) -> Iterator[tuple[slice, Rows]]:
    """Blocks that each lie within one sequence and see no more of the table than they need."""
    page_size, num_q_heads = call.k_cache.shape[1], call.query.shape[1]
    lengths = call.seq_lens.tolist()
    bounds = range(len(lengths) + 1) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for b, length in enumerate(lengths):
        start, end = bounds[b], bounds[b + 1]
        step = max(1, BLOCK_NUMBERS // max(1, length * num_q_heads))
        for first in range(start, end, step) if length > 0 else ():
            last = min(first + step, end)
            keys = min(length, length - end + last) if call.causal else length
            position = torch.arange(length - end + first, length - end + last, device=call.query.device)
            table = call.block_table[b : b + 1, : -(-max(keys, 0) // page_size)]
            yield slice(first, last), Rows(table, call.seq_lens[b : b + 1], position)


def _token_blocks(call: AttentionCall) -> Iterator[tuple[slice, Rows]]:
    """Blocks of tokens of any sequences."""
    num_tokens, num_q_heads, head_dim = call.query.shape
    _, page_size, num_kv_heads, v_dim = call.v_cache.shape
    rows = rows_of(call)
    per_key = num_q_heads if rows.table.shape[0] == 1 else num_kv_heads * max(v_dim, head_dim)
    step = max(1, BLOCK_NUMBERS // max(1, rows.table.shape[1] * page_size * per_key))
    for first in range(0, num_tokens, step):
        tokens = slice(first, first + step)
        table = rows.table if rows.table.shape[0] == 1 else rows.table[tokens]
        yield tokens, Rows(table, rows.length[tokens], rows.position[tokens])
