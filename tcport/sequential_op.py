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
from tcport.operator_library import LIBRARY, define_twin

_POSITIONAL = ("query", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")


def attend_in_turn(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention of a call as one node of a graph; shapes and dtypes as ``tcport::paged_attention`` has them."""
    options = {name: value for name, value in vars(call).items() if name not in _POSITIONAL}
    return torch.ops.tcport.attend_in_turn.default(*(getattr(call, name) for name in _POSITIONAL), **options)


def _run(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return blocked.paged_attention(AttentionCall.of(*args, **options))


define_twin("attend_in_turn", "paged_attention", _run)
forbid_backward(LIBRARY, "attend_in_turn")
