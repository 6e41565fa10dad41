"""One launch over blocks of query rows and splits of the keys, and the merge of the splits."""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall, Launcher
from tcport.kernels.triton_arguments import attention_arguments
from tcport.kernels.triton_attention import paged_attention_kernel
from tcport.kernels.triton_combine import combine

_MOST_SPLITS = 2**16 - 1  # of the second grid dimension, on CUDA and on HIP


def attend_in_splits(
    call: AttentionCall, config: TileConfig, launch: Launcher, blocks: int | torch.SymInt
) -> tuple[Tensor, Tensor]:
    """Allocate the results, run the attention kernel, and merge where there is more than one split.

    Args:
        blocks: blocks of query rows per KV head.
    """
    query = call.query
    num_tokens, num_heads = query.shape[0], int(query.shape[1])
    num_kv_heads, v_dim = int(call.v_cache.shape[2]), int(call.v_cache.shape[3])
    out = query.new_empty(num_tokens, num_heads, v_dim)
    lse = query.new_empty((num_tokens, num_heads) if call.return_lse else (0,), dtype=torch.float32)
    wanted_lse = lse if call.return_lse else None
    splits = number_of_splits(call, config)

    def attend(target: Tensor, target_lse: Tensor | None) -> None:
        launch(paged_attention_kernel)[(blocks * num_kv_heads, splits)](
            **attention_arguments(call, config),
            out=target,
            lse=target_lse,
            num_seqs=call.seq_lens.shape[0],
            num_tokens=num_tokens,
            num_splits=splits,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    if isinstance(splits, int) and splits == 1:
        attend(out, wanted_lse)
        return out, lse
    # Flat, because a dimension that is a symbolic number of splits would guard the traced graph on its being 1.
    rows = splits * num_tokens * num_heads
    partial_out = query.new_empty(rows * v_dim, dtype=torch.float32)
    partial_lse = query.new_empty(rows, dtype=torch.float32)
    attend(partial_out, partial_lse)
    combine(partial_out, partial_lse, splits, out, wanted_lse, config.num_warps, launch)
    return out, lse


def number_of_splits(call: AttentionCall, config: TileConfig) -> int | torch.SymInt:
    """Parts that the keys of every sequence are cut into.

    A number forced by the call goes first. A batch-invariant call takes the tile's number for the smallest sizes
    whatever its own are: with a constant number, how a sequence is cut depends on its own length alone.

    Where a traced graph leaves sizes open, a number that depends on them is not known to be 1, and the code is that for
    any number: partial results, and their merge. Beside decode's reading of the cache they are little; a prompt's are
    as large as all it reads, and its keys are not cut.
    """
    if call.num_splits is not None:
        return min(call.num_splits, _MOST_SPLITS)
    if call.batch_invariant:
        return config.splits(1, 1, 1)
    context = call.block_table.shape[1] * int(call.k_cache.shape[1])
    splits = config.splits(call.seq_lens.shape[0], call.query.shape[0], context)
    return splits if isinstance(splits, int) or call.cu_seqlens_q is None else 1
