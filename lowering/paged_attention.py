"""The chain of ``tcport::paged_attention``: tuned Triton, generic Triton, PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tcport.device import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import AttentionSpec, TileConfig
from tcport.kernels.call import AttentionCall, Launcher
from tcport.lowering.candidate import Candidate, Tier, Verdict
from tcport.lowering.registry import Answer, register_lowering
from tcport.tiling import rank_tiles

_TUNED_TILES = 3
"""Ranked tiles that are tried before the smallest one: what defeats the compiler in one often spares the next."""

Kernel = Callable[[AttentionCall, TileConfig, Launcher], tuple[Tensor, Tensor]]


@register_lowering("paged_attention", name="triton_decode")
def triton_decode(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """Split-KV decode: few query tokens per sequence, KV read once per group of query heads."""
    if spec.form != "decode":
        return Verdict.no("several query tokens per sequence: the prefill kernel takes them")
    return _triton("triton_decode", spec, profile)


@register_lowering("paged_attention", name="triton_prefill")
def triton_prefill(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """Any mix of query lengths, packed by ``cu_seqlens_q``."""
    if spec.form == "decode":
        return Verdict.no("one query token per sequence: the decode kernel takes it")
    return _triton("triton_prefill", spec, profile)


@register_lowering("paged_attention", name="torch_attention")
def torch_attention(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, compiled by Inductor where the graph is compiled."""
    return Candidate("torch_attention", "torch", _run_torch)


def _triton(name: str, spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """The best ranked tiles of a Triton kernel, and behind them the smallest legal one as the generic link."""
    if profile.vendor == "cpu":
        return Verdict.no("Triton has no CPU target")
    if "float64" in (spec.query_dtype, spec.kv_dtype):
        return Verdict.no("the Triton kernels accumulate in fp32")
    kernel = _load(name)
    try:
        ranking = rank_tiles(spec, profile)
    except NoTileError as error:
        return Verdict.no(error.cause)
    best = ranking.configs[:_TUNED_TILES]
    smallest = min(ranking.configs, key=lambda c: (c.block_m * c.block_n, c.num_stages, c.num_warps))
    tiles: list[tuple[Tier, TileConfig]] = [("tuned", tile) for tile in best]
    if smallest not in best:
        tiles.append(("generic", smallest))
    return [Candidate(name, tier, _bind(kernel, tile), tile) for tier, tile in tiles]


def _run_torch(call: AttentionCall, launch: Launcher) -> tuple[Tensor, Tensor]:
    from tcport.kernels import blocked, decomposition

    # Traced, it becomes one fused loop; run operation by operation, it has to bound what it materialises.
    traced = launch is torch.library.wrap_triton
    return (decomposition if traced else blocked).paged_attention(call)


def _bind(kernel: Kernel, tile: TileConfig) -> Callable[[AttentionCall, Launcher], Any]:
    return lambda call, launch: kernel(call, tile, launch)


def _load(name: str) -> Kernel:
    """Triton kernels are imported when a node first needs one: importing tcport must not need Triton."""
    if name == "triton_decode":
        from tcport.kernels.triton_decode import paged_decode

        return paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    return paged_prefill
