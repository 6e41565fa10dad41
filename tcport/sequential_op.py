"""``tcport::attend_in_turn``: plain PyTorch attention one sequence after the other, opaque to compilers.

Nobody calls it by hand: it is the last link of a batch-invariant call in compiled code. What Inductor makes of the
decomposition cannot keep that promise, because how it splits a sum depends on the sizes of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport.inference_only import forbid_backward
from tcport.kernels import blocked
from tcport.kernels.call import AttentionCall
from tcport.ops import LIBRARY, TAGS


def attend_in_turn(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention of a call as one node of a graph; shapes and dtypes as ``tcport::paged_attention`` has them."""
    return torch.ops.tcport.attend_in_turn.default(*vars(call).values())


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    return blocked.paged_attention(AttentionCall(*arguments))


def _fake(query: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return_lse = rest[-1]
    out = query.new_empty((*query.shape[:-1], v_cache.shape[-1]))
    return out, query.new_empty(query.shape[:-1] if return_lse else (0,), dtype=torch.float32)


LIBRARY.define(
    "attend_in_turn(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? cu_seqlens_q, float scale, bool causal, int? window, float softcap, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? mask, int? chunk, int? num_splits, bool batch_invariant, "
    "bool return_lse) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
LIBRARY.impl("attend_in_turn", _run, "CompositeExplicitAutograd")
torch.library.register_fake("tcport::attend_in_turn", _fake, lib=LIBRARY)
forbid_backward(LIBRARY, "attend_in_turn")
