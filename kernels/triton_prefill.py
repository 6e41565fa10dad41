"""Paged attention of any mix of query lengths: prompts, chunks of prompts, single tokens, drafts to verify."""

from __future__ import annotations

from torch import Tensor

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall, Launcher
from tcport.kernels.triton_arguments import head_blocks, tokens_per_block
from tcport.kernels.triton_splits import attend_in_splits


def paged_prefill(call: AttentionCall, config: TileConfig, launch: Launcher) -> tuple[Tensor, Tensor]:
    """Attention of packed query tokens.

    Args:
        call: a call with ``cu_seqlens_q``; the lengths in it stay on the device.
        config: ``block_m`` rows hold several tokens times the query heads of one KV head, ``block_n`` keys, and
            ``num_splits`` parts of the keys (1 unless few tokens face many keys).
        launch: see :data:`tcport.kernels.call.Launcher`.

    Returns:
        As :func:`tcport.kernels.triton_decode.paged_decode`.
    """
    tokens = tokens_per_block(call, config)
    # Every sequence may begin a block of its own, and so may the rows before and behind all sequences.
    blocks = (call.query.shape[0] // tokens + call.seq_lens.shape[0] + 2) * head_blocks(call, config)
    return attend_in_splits(call, config, launch, blocks)
