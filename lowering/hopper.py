"""The row of the kernel for Hopper, ahead of the plain one for prompts and chunks of prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tcport.device import DeviceProfile, device_profile
from tcport.errors import NoTileError
from tcport.fingerprint import triton_version
from tcport.inference_only import forbid_backward
from tcport.ir import AttentionSpec, KVLayout, TileConfig
from tcport.kernels import hopper_prefill
from tcport.kernels.call import AttentionCall, Launcher, is_traced
from tcport.lowering.candidate import Candidate, Terms, Verdict
from tcport.lowering.registry import Answer, register_lowering
from tcport.operator_library import LIBRARY, define_twin
from tcport.tiling.hopper import hopper_tiles_of, rank_hopper_tiles

_TRITON = ((3, 6), (3, 9))
"""Versions of Triton, first and last, whose Gluon the kernel is written in."""

_DIMS = (64, 128, 256)
_LACKS = ("mask", "chunk", "softcap", "alibi", "sinks", "kv_scales", "batch_invariant")
_ROWS_WORTH_A_TILE = hopper_prefill.BLOCK_M // 2
_WHY = f"the next kernel runs instead where rows per sequence are under {_ROWS_WORTH_A_TILE} or CTAs too few"


@register_lowering("paged_attention", name="hopper_prefill", vendor="nvidia", arch="sm_90*", priority=10)
def hopper_attention(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """TMA, wgmma and warps of two kinds; it splits no sequence's keys, so calls of few rows go to the next kernel."""
    if (why := _refusal(spec)) is not None:
        return Verdict.no(why)
    units = profile.compute_units or 1
    if isinstance(spec.num_tokens, int) and isinstance(spec.num_seqs, int):
        few = too_few(spec.num_tokens, spec.num_seqs, spec.num_q_heads, spec.num_kv_heads, units)
        if few is not None:
            return Verdict.no(few)
    try:
        tile = rank_hopper_tiles(spec, profile).configs[0]
    except NoTileError as error:
        return Verdict.no(error.cause)
    if (why := _box_misfit(spec, tile)) is not None:
        return Verdict.no(why)

    def run(call: AttentionCall, launch: Launcher) -> tuple[Tensor, Tensor]:
        if is_traced(launch):
            return _call_twin(call, getattr(launch, "terms", Terms()))
        return hopper_prefill.hopper_prefill(call, tile, launch, units)

    return Candidate("hopper_prefill", "tuned", run, tile, why=_WHY, aside=lambda call: _misfit(call, units))


def too_few(tokens: int, seqs: int, heads: int, kv_heads: int, units: int) -> str | None:
    """Why so few rows go to the next kernel: rows have to fill half a tile, and tiles a quarter of the device.

    On an H200, against 8192 keys with 8 KV heads, 16 CTAs took 2.3 times as long as the plain kernel, which cuts keys,
    and 64 CTAs 0.58 times; 32 rows per sequence took as long as in the plain kernel, and 64 rows 0.72 times.

    Args:
        units: multiprocessors.
    """
    seqs = max(1, seqs)
    rows = tokens * (heads // kv_heads)
    blocks = max(seqs, rows // hopper_prefill.BLOCK_M) * kv_heads
    if rows < _ROWS_WORTH_A_TILE * seqs:
        return f"{rows} rows of {seqs} sequences: under {_ROWS_WORTH_A_TILE} each, tiles are mostly empty"
    if 4 * blocks < units:
        return f"{blocks} CTAs are under a quarter of {units} multiprocessors, and it does not cut keys"
    return None


def _refusal(spec: AttentionSpec) -> str | None:
    """What of a call the kernel does not do, or does not do well."""
    if spec.form == "decode":
        return "one query token per sequence: the decode kernel takes it"
    version = tuple(map(int, re.findall(r"\d+", triton_version())[:2]))
    if not _TRITON[0] <= version <= _TRITON[1]:
        known = " to ".join(".".join(map(str, end)) for end in _TRITON)
        return f"written for the Gluon of Triton {known}, this is {triton_version()}"
    if spec.query_dtype not in ("float16", "bfloat16") or spec.kv_dtype != spec.query_dtype:
        return f"takes 16-bit floats of one dtype, not {spec.query_dtype} with a cache of {spec.kv_dtype}"
    if spec.head_dim_qk != spec.head_dim_v or spec.head_dim_qk not in _DIMS:
        return f"takes head dims {', '.join(map(str, _DIMS))}, not {spec.head_dim_qk} and {spec.head_dim_v}"
    if spec.group_size > hopper_prefill.BLOCK_M:
        return f"{spec.group_size} query heads of one KV head are more than the {hopper_prefill.BLOCK_M} rows of a tile"
    lacking = [name for name in _LACKS if getattr(spec, name)]
    if spec.num_splits is not None and spec.num_splits > 1:
        lacking.append("num_splits")
    if lacking:
        return f"has no {', '.join(lacking)}"
    for name, layout in (("K", spec.k_layout), ("V", spec.v_layout)):
        if (why := _layout_misfit(layout, spec)) is not None:
            return f"{name}: {why}"
    return None


def _layout_misfit(layout: KVLayout, spec: AttentionSpec) -> str | None:
    strides = (layout.stride_page, layout.stride_token, layout.stride_head, layout.stride_dim)
    known = tuple(stride for stride in strides if isinstance(stride, int))
    # Strides that are open in a traced graph are looked at when it runs.
    return hopper_prefill.layout_misfit(known, spec.num_kv_heads, spec.head_dim_qk) if len(known) == 4 else None


def _box_misfit(spec: AttentionSpec, tile: TileConfig) -> str | None:
    sizes = (spec.k_layout.page_size, tile.block_n)
    box = hopper_prefill.box_keys(*sizes)
    if box >= hopper_prefill.SMALLEST_BOX:
        return None
    return (
        f"{box} keys lie together in pages of {sizes[0]} and tiles of {sizes[1]}, {hopper_prefill.SMALLEST_BOX} have to"
    )


def _misfit(call: AttentionCall, units: int) -> str | None:
    """Why sizes or addresses, which only the call itself tells, do not suit the kernel."""
    tokens, seqs = int(call.query.shape[0]), int(call.seq_lens.shape[0])
    few = too_few(tokens, seqs, int(call.query.shape[1]), int(call.k_cache.shape[2]), units)
    return few or hopper_prefill.misfit(call)


def _call_twin(call: AttentionCall, terms: Terms) -> tuple[Tensor, Tensor]:
    """In traced code the kernel is one opaque operator: Inductor cannot print Gluon, nor descriptors of addresses."""
    options = {name: value for name, value in vars(call).items() if name not in _POSITIONAL}
    positional = (getattr(call, name) for name in _POSITIONAL)
    return torch.ops.tcport.hopper_prefill.default(
        *positional, **options, kernels=list(terms.kernels) or None, strict=terms.strict
    )


def _run_twin(
    *args: Any, kernels: Sequence[str] | None = None, strict: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    call = AttentionCall.of(*args, **options)
    profile = device_profile(call.query.device)
    units = profile.compute_units or 1
    if _misfit(call, units) is not None:
        # Down the chain, past this kernel and past what has failed on this device, as far as the options allow.
        if kernels or strict:
            return torch.ops.tcport.paged_attention_on_terms.default(*args, **options, kernels=kernels, strict=strict)
        return torch.ops.tcport.paged_attention.default(*args, **options)
    tile = hopper_tiles_of(int(call.query.shape[2]), profile).configs[0]
    return hopper_prefill.hopper_prefill(call, tile, lambda kernel: kernel, units)


_POSITIONAL = ("query", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
define_twin("hopper_prefill", "paged_attention", _run_twin, more="str[]? kernels=None, bool strict=False")
forbid_backward(LIBRARY, "hopper_prefill")
