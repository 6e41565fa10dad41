"""Paged decode: one query token per sequence, the keys of long sequences cut into parts for several programs."""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall, Launcher
from tcport.kernels.triton_arguments import head_blocks
from tcport.kernels.triton_splits import attend_in_parts, attend_in_splits, number_of_parts


def paged_decode(call: AttentionCall, config: TileConfig, launch: Launcher) -> tuple[Tensor, Tensor]:
    """Attention of one query token per sequence.

    Args:
        call: a call without ``cu_seqlens_q``.
        config: ``block_m`` rows hold the query heads of one KV head (a wider group takes several blocks),
            ``block_n`` keys, ``parts`` of a sequence on average, or ``num_splits`` of every one.
        launch: see :data:`tcport.kernels.call.Launcher`.

    Returns:
        ``out [T, Hq, Dv]`` in the query's dtype and ``lse [T, Hq]`` fp32 (shape ``[0]`` unless the call wants it).
    """
    parts = number_of_parts(call, config)
    if not isinstance(parts, int) or parts > 0:
        return attend_in_parts(call, config, launch, parts)
    # At least one program: some launchers refuse an empty grid. It finds no sequence and returns.
    sequences: int | torch.SymInt = torch.sym_max(call.seq_lens.shape[0], 1)  # type: ignore[assignment]
    return attend_in_splits(call, config, launch, sequences * head_blocks(call, config))
