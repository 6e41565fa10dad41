"""The operators' arguments as the kernels see them: checked, with every default filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Launcher = Callable[[Any], Any]
"""Turns a Triton kernel into something to call as ``launcher(kernel)[grid](...)``.

Eager code passes the identity; code that is being traced passes ``torch.library.wrap_triton``.
"""


def is_traced(launch: Launcher) -> bool:
    """Whether launches become nodes of a graph: kernel, grid, arguments, warps and stages, and no other option."""
    return launch is torch.library.wrap_triton or getattr(launch, "traced", False)


_FAR = 2**30  # a window or chunk beyond any length; keeps the arithmetic of int32 positions within 32 bits


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether a write to one of two tensors can be a write to the other; real, fake and meta tensors alike."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


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
            share_storage(k, v)
            and v.dtype == k.dtype
            and v.stride() == k.stride()
            and bool(v.storage_offset() == k.storage_offset())  # a SymBool where the offsets are open
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
        window: int | None = None,
        chunk: int | None = None,
        **options: Any,
    ) -> AttentionCall:
        """The call behind the operator's own arguments.

        ``scale=None`` becomes ``Dqk ** -0.5``; a window or chunk that reaches past any length becomes one that kernels
        can add to a position.
        """
        scale = int(query.shape[-1]) ** -0.5 if scale is None else scale
        options["window"] = None if window is None else min(window, _FAR)
        options["chunk"] = None if chunk is None else min(chunk, _FAR)
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
    def of(
        cls, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, **options: Any
    ) -> WriteCall:
        """The call behind the operator's own arguments.

        Rows that lie in a cache themselves (slots that are moved) are copied first: kernels write in no certain order.
        """
        key, value = (
            rows.clone() if share_storage(rows, k_cache) or share_storage(rows, v_cache) else rows
            for rows in (key, value)
        )
        return cls(key, value, k_cache, v_cache, slot_mapping, **options)


@dataclasses.dataclass(frozen=True)
class WriteAndAttendCall:
    """The arguments of ``tcport::write_and_attend``: a cache write, and the attention over the same cache after it."""

    write: WriteCall
    attend: AttentionCall

    @property
    def k_cache(self) -> Tensor:
        """The cache of keys, which both halves name."""
        return self.attend.k_cache

    @property
    def v_cache(self) -> Tensor:
        """The cache of values, which both halves name."""
        return self.attend.v_cache

    @classmethod
    def of(cls, *args: Any, **options: Any) -> WriteAndAttendCall:
        """The call behind the operator's own arguments."""
        write, attend = cls.halves(*args, **options)
        return cls(WriteCall.of(**write), AttentionCall.of(**attend))

    @staticmethod
    def halves(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The operator's arguments as those of ``kv_write`` and those of ``paged_attention``."""
        shared = {"k_cache": k_cache, "v_cache": v_cache}
        scales = {name: options.get(name) for name in ("k_scale", "v_scale")}
        write = {"key": key, "value": value, **shared, "slot_mapping": slot_mapping, **scales}
        tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        return write, {"query": query, **shared, **tables, **options}


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
