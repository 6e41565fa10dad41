"""One attention call as the kernels see it: checked, with every default filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

Launcher = Callable[[Any], Any]
"""Turns a Triton kernel into something to call as ``launcher(kernel)[grid](...)``.

Eager code passes the identity; code that is being traced passes ``torch.library.wrap_triton``.
"""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments of ``tcport::paged_attention``; shapes and meanings in :mod:`tcport.kernels.reference`."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    mask: Tensor | None = None
    chunk: int | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    return_lse: bool = False
