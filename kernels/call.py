"""The operators' arguments as the kernels see them: checked, with every default filled in."""

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

    @property
    def v_is_view_of_k(self) -> bool:
        """Whether V is the first ``Dv`` components of K (multi-head latent attention), so that K serves as both."""
        k, v = self.k_cache, self.v_cache
        return (
            v.untyped_storage()._cdata == k.untyped_storage()._cdata
            and v.dtype == k.dtype
            and v.stride() == k.stride()
            and v.storage_offset() == k.storage_offset()
        )

    @classmethod
    def of(
        cls,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor | None = None,
        *,
        scale: float | None = None,
        **options: Any,
    ) -> AttentionCall:
        """The call behind the operator's own arguments; ``scale=None`` becomes ``Dqk ** -0.5``."""
        scale = int(query.shape[-1]) ** -0.5 if scale is None else scale
        return cls(query, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, **options)


@dataclasses.dataclass(frozen=True)
class WriteCall:
    """The arguments of ``tcport::kv_write``; shapes and meanings in :mod:`tcport.kernels.reference`."""

    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def of(cls, *args: Tensor, **options: Any) -> WriteCall:
        """The call behind the operator's own arguments."""
        return cls(*args, **options)


@dataclasses.dataclass(frozen=True)
class MergeCall:
    """The arguments of ``tcport::merge_states``; shapes and meanings in :mod:`tcport.kernels.reference`."""

    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor

    @classmethod
    def of(cls, *args: Tensor) -> MergeCall:
        """The call behind the operator's own arguments."""
        return cls(*args)
