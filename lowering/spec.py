"""From the tensors of a call to the facts that choose its kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import sympy
import torch
from torch import Tensor

from tcport.ir import BATCH, CONTEXT, TOKENS, AttentionSpec, Dim, KVLayout
from tcport.kernels.call import AttentionCall, MergeCall, WriteAndAttendCall, WriteCall

Spec = TypeVar("Spec")
_OPEN_SIZES = {"num_seqs": BATCH, "num_tokens": TOKENS, "max_context": CONTEXT}
_FEW = {"num_seqs": 16, "num_tokens": 16, "max_context": 128}
"""Sizes of the largest small decode batch: with 8 KV heads it has 128 tiles, fewer than an H200 has units."""


@dataclasses.dataclass(frozen=True)
class WriteSpec:
    """One cache write, reduced to the facts that choose a kernel and a tile."""

    num_tokens: Dim
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    source_dtype: str
    kv_dtype: str
    k_layout: KVLayout
    v_layout: KVLayout
    kv_scales: bool


@dataclasses.dataclass(frozen=True)
class WriteAndAttendSpec:
    """A cache write and the attention after it."""

    write: WriteSpec
    attend: AttentionSpec


@dataclasses.dataclass(frozen=True)
class MergeSpec:
    """One merge of two attention states."""

    num_tokens: Dim
    num_heads: int
    head_dim: int
    dtype: str


def attention_spec(call: AttentionCall) -> AttentionSpec:
    """The spec of an attention call on real or fake tensors; symbolic sizes stay symbolic."""
    k, v = call.k_cache, call.v_cache
    return AttentionSpec(
        form="decode" if call.cu_seqlens_q is None else "varlen",
        num_q_heads=int(call.query.shape[1]),
        num_kv_heads=int(k.shape[2]),
        head_dim_qk=int(k.shape[3]),
        head_dim_v=int(v.shape[3]),
        query_dtype=dtype_name(call.query.dtype),
        kv_dtype=dtype_name(k.dtype),
        k_layout=kv_layout(k),
        v_layout=kv_layout(v),
        causal=call.causal,
        window=call.window is not None,
        chunk=call.chunk is not None,
        softcap=call.softcap > 0,
        alibi=call.alibi_slopes is not None,
        sinks=call.sinks is not None,
        mask=call.mask is not None,
        kv_scales=call.k_scale is not None or call.v_scale is not None,
        num_splits=call.num_splits,
        batch_invariant=call.batch_invariant,
        return_lse=call.return_lse,
        v_is_view_of_k=call.v_is_view_of_k,
        # Last, when sizes that were asked for as numbers are numbers: equal calls then have equal specs.
        num_seqs=dim(call.block_table.shape[0]),
        num_tokens=dim(call.query.shape[0]),
        max_context=dim(call.block_table.shape[1]) * dim(k.shape[1]),
    )


def write_spec(call: WriteCall) -> WriteSpec:
    """The spec of a cache write on real or fake tensors."""
    return WriteSpec(
        num_kv_heads=int(call.k_cache.shape[2]),
        head_dim_qk=int(call.k_cache.shape[3]),
        head_dim_v=int(call.v_cache.shape[3]),
        source_dtype=dtype_name(call.key.dtype),
        kv_dtype=dtype_name(call.k_cache.dtype),
        k_layout=kv_layout(call.k_cache),
        v_layout=kv_layout(call.v_cache),
        kv_scales=call.k_scale is not None or call.v_scale is not None,
        num_tokens=dim(call.slot_mapping.shape[0]),
    )


def write_and_attend_spec(call: WriteAndAttendCall) -> WriteAndAttendSpec:
    """The specs of both halves."""
    return WriteAndAttendSpec(write_spec(call.write), attention_spec(call.attend))


def opened(spec: Spec) -> Spec:
    """The same spec with every size left open that changes from step to step: batch, tokens and context.

    What is chosen for it is chosen for all of them, so that a call of new sizes finds its kernels compiled.
    """
    return dataclasses.replace(spec, **_open_sizes_of(type(spec)))  # type: ignore[type-var]


def kind_of(spec: Spec) -> Spec:
    """The spec that is planned for in its place: one for all sizes, and one for small decode batches.

    A small batch is over before the merge of keys that were cut for a large one. How small it is says the width of its
    block table: lengths stay on the device.
    """
    small = isinstance(spec, AttentionSpec) and spec.form == "decode" and _is_small(spec)
    return dataclasses.replace(spec, **_FEW) if small else opened(spec)  # type: ignore[type-var]


def merge_spec(call: MergeCall) -> MergeSpec:
    """The spec of a merge on real or fake tensors."""
    tokens, heads, head_dim = call.out_a.shape
    return MergeSpec(dim(tokens), int(heads), int(head_dim), dtype_name(call.out_a.dtype))


def kv_layout(cache: Tensor) -> KVLayout:
    """Page size and strides of a cache of logical shape ``[pages, page, KV heads, dim]``."""
    return KVLayout(int(cache.shape[1]), *(dim(stride) for stride in cache.stride()))


def dim(size: int | torch.SymInt) -> Dim:
    """A size as an int, or as the sympy expression behind a ``SymInt``."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if isinstance(expr, sympy.Integer) else expr
    return int(size)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def compiled_facts(spec: object) -> str:
    """What of a spec can make a kernel compile or not, as text: sizes that stay open and symbolic strides left out."""
    facts = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}  # type: ignore[arg-type]
    closed = {name: value for name, value in facts.items() if name not in _OPEN_SIZES}
    for name, value in closed.items():
        if isinstance(value, KVLayout):
            strides = {k: v if isinstance(v, int) else None for k, v in dataclasses.asdict(value).items()}
            closed[name] = tuple(strides.values())
        elif dataclasses.is_dataclass(value):
            closed[name] = compiled_facts(value)
    return repr(tuple(closed.items()))


def _is_small(spec: AttentionSpec) -> bool:
    sizes = {name: getattr(spec, name) for name in _FEW}
    return all(isinstance(size, int) and size <= _FEW[name] for name, size in sizes.items())


@functools.cache
def _open_sizes_of(kind: type) -> dict[str, Dim]:
    return {field.name: _OPEN_SIZES[field.name] for field in dataclasses.fields(kind) if field.name in _OPEN_SIZES}
