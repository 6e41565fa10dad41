"""One launch over blocks of query rows and splits of the keys, and the merge of the splits.

Keys are cut in one of two ways. Splits cut every sequence into the same number: a prompt's keys, and calls whose
results must not depend on the rest of the batch. Parts (:mod:`tcport.kernels.triton_parts`) cut a decode batch by its
lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.ir import FEW_SPLITS, TileConfig
from tcport.kernels.call import AttentionCall, Launcher, is_traced
from tcport.kernels.target import overlaps_launches
from tcport.kernels.triton_arguments import attention_arguments, head_blocks
from tcport.kernels.triton_attention import paged_attention_kernel
from tcport.kernels.triton_combine import combine
from tcport.kernels.triton_partial import PLACE, record_words

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
    out, lse, wanted_lse = _results(call)
    splits = number_of_splits(call, config)
    whole = isinstance(splits, int) and splits == 1
    overlapped = not whole and _overlaps(call, launch)

    scratch, record = None, record_words(num_heads, v_dim)
    if not whole:
        # Flat, because a dimension that is a symbolic number of splits would guard the traced graph on its being 1.
        scratch = query.new_empty(splits * num_tokens * record, dtype=torch.int64)
    launch(paged_attention_kernel)[(blocks * num_kv_heads, splits)](
        **attention_arguments(call, config),
        out=out,
        lse=wanted_lse,
        scratch=scratch,
        num_seqs=call.seq_lens.shape[0],
        num_tokens=num_tokens,
        num_splits=splits,
        RECORD=record,
        PARTS=False,
        MERGED=overlapped,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if scratch is not None:
        wide = _many_splits(call, config)
        combine(scratch, splits, out, wanted_lse, config.num_warps, launch, wide=wide, overlapped=overlapped)
    return out, lse


def attend_in_parts(
    call: AttentionCall, config: TileConfig, launch: Launcher, most: int | torch.SymInt
) -> tuple[Tensor, Tensor]:
    """One query token per sequence, the keys of the batch cut into at most ``most`` parts for each block of heads."""
    query = call.query
    num_tokens, num_heads = query.shape[0], int(query.shape[1])
    num_kv_heads, v_dim = int(call.v_cache.shape[2]), int(call.v_cache.shape[3])
    num_seqs = call.seq_lens.shape[0]
    out, lse, wanted_lse = _results(call)
    record = record_words(num_heads, v_dim)
    scratch = query.new_empty(num_seqs * PLACE.value + most * record, dtype=torch.int64)
    overlapped = _overlaps(call, launch)
    launch(paged_attention_kernel)[(most * (head_blocks(call, config) * num_kv_heads), 1)](
        **attention_arguments(call, config),
        out=out,
        lse=wanted_lse,
        scratch=scratch,
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        num_splits=0,
        RECORD=record,
        PARTS=True,
        MERGED=overlapped,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    combine(scratch, None, out, wanted_lse, config.num_warps, launch, overlapped=overlapped)
    return out, lse


def _results(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Memory for the output and the LSE, and the LSE again as a kernel is given it: None where it is not asked for."""
    num_tokens, num_heads, v_dim = call.query.shape[0], int(call.query.shape[1]), int(call.v_cache.shape[3])
    out = call.query.new_empty(num_tokens, num_heads, v_dim)
    lse = call.query.new_empty((num_tokens, num_heads) if call.return_lse else (0,), dtype=torch.float32)
    return out, lse, lse if call.return_lse else None


def number_of_parts(call: AttentionCall, config: TileConfig) -> int | torch.SymInt:
    """The most parts that the keys of a batch are cut into; 0 where every sequence is cut into the same number."""
    if call.num_splits is not None or call.batch_invariant:
        return 0
    seqs, context = call.seq_lens.shape[0], call.block_table.shape[1] * int(call.k_cache.shape[1])
    each = config.parts_for(seqs, call.query.shape[0], context)
    return 0 if isinstance(each, int) and each == 0 else torch.sym_max(1, seqs * each)  # type: ignore[return-value]


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


def _many_splits(call: AttentionCall, config: TileConfig) -> bool:
    """Whether splits may be more than :data:`tcport.ir.FEW_SPLITS`; what is open may be."""
    forced = call.num_splits is not None or call.batch_invariant
    splits = number_of_splits(call, config) if forced else config.num_splits
    return not isinstance(splits, int) or splits > FEW_SPLITS


def _overlaps(call: AttentionCall, launch: Launcher) -> bool:
    """Whether the merge is launched while the attention kernel runs. Inductor launches one kernel after the other."""
    return not is_traced(launch) and overlaps_launches(call.query.device)
