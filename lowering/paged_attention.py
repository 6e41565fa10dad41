"""The chain of ``tcport::paged_attention``: tuned Triton, generic Triton, PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from tcport.device import DeviceProfile
from tcport.errors import OutOfResourcesError
from tcport.ir import AttentionSpec, TileConfig
from tcport.kernels.call import AttentionCall, Launcher
from tcport.lowering.candidate import Candidate, Tier, Verdict
from tcport.lowering.launch_options import with_options
from tcport.lowering.registry import Answer, LowerFn, register_lowering
from tcport.lowering.targets import ANY_GPU, TARGETS, Options, Target, target_of
from tcport.lowering.tile_order import tile_order
from tcport.sequential_op import attend_in_turn
from tcport.tiling import tuned

_TUNED_TILES = 3
"""Ranked tiles that are tried before the smallest one: what defeats the compiler in one often spares the next."""

Kernel = Callable[[AttentionCall, TileConfig, Launcher], tuple[Tensor, Tensor]]


@register_lowering("paged_attention", name="torch_attention")
def torch_attention(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, compiled by Inductor where the graph is compiled.

    Not compiled where the call is batch-invariant: how Inductor splits a sum depends on the sizes of the whole batch.
    """
    why = "sequence by sequence, uncompiled: compiled sums depend on the batch" if spec.batch_invariant else ""
    return Candidate("torch_attention", "torch", _run_torch, why=why)


def every_tile(spec: AttentionSpec, profile: DeviceProfile) -> list[Candidate]:
    """The Triton kernel of a spec with each tile that a device can have, in the order of a chain without measurements.

    Raises:
        OutOfResourcesError: no tile fits.
    """
    target, name = target_of(profile), "triton_decode" if spec.form == "decode" else "triton_prefill"
    tiles = tile_order(name, spec, profile, target, by_measurement=False).tiles
    return [_candidate(name, "tuned", tile, target.options(spec, tile)) for tile in tiles]


def _register(name: str, takes: Callable[[AttentionSpec], Verdict]) -> None:
    """Rows of a Triton kernel: one for each family of GPUs, and one for devices of no known vendor."""
    for target in (*TARGETS, ANY_GPU):
        where = {"vendor": target.vendor, "arch": target.arch, "flags": target.flags}
        register_lowering("paged_attention", name=name, state=tuned.state, **where)(_row(name, takes, target))


def _row(name: str, takes: Callable[[AttentionSpec], Verdict], target: Target) -> LowerFn:
    """The best tiles of the kernel, the first of them compiled, and the smallest legal one as the generic link."""

    def lower(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
        if profile.vendor == "cpu":
            return Verdict.no("Triton has no CPU target")
        if not (verdict := takes(spec)).ok:
            return verdict
        if "float64" in (spec.query_dtype, spec.kv_dtype):
            return Verdict.no("the Triton kernels accumulate in fp32")
        try:
            order = tile_order(name, spec, profile, target)
        except OutOfResourcesError as error:
            return Verdict.no(error.cause)
        best = order.tiles[:_TUNED_TILES]
        smallest = min(order.tiles, key=lambda tile: (tile.block_m * tile.block_n, tile.num_stages, tile.num_warps))
        tiles: list[tuple[Tier, TileConfig]] = [("tuned", tile) for tile in best]
        if smallest not in best:
            tiles.append(("generic", smallest))
        first, *rest = [_candidate(name, tier, tile, target.options(spec, tile)) for tier, tile in tiles]
        return [dataclasses.replace(first, why=order.why, footprint=order.footprint), *rest, *order.rejections]

    return lower


def _candidate(name: str, tier: Tier, tile: TileConfig, options: Options) -> Candidate:
    kernel = _load(name)

    def run(call: AttentionCall, launch: Launcher) -> tuple[Tensor, Tensor]:
        return kernel(call, tile, with_options(launch, options))

    return Candidate(name, tier, run, tile, options=tuple(options.items()))


def _takes_decode(spec: AttentionSpec) -> Verdict:
    """Split-KV decode: one query token per sequence, KV read once per group of query heads."""
    if spec.form != "decode":
        return Verdict.no("several query tokens per sequence: the prefill kernel takes them")
    return Verdict(True)


def _takes_varlen(spec: AttentionSpec) -> Verdict:
    """Any mix of query lengths, packed by ``cu_seqlens_q``."""
    if spec.form == "decode":
        return Verdict.no("one query token per sequence: the decode kernel takes it")
    return Verdict(True)


def _run_torch(call: AttentionCall, launch: Launcher) -> tuple[Tensor, Tensor]:
    from tcport.kernels import blocked, decomposition

    # Traced, it becomes one fused loop; run operation by operation, it has to bound what it materialises.
    traced = launch is torch.library.wrap_triton
    if traced and call.batch_invariant:
        return attend_in_turn(call)
    return (decomposition if traced else blocked).paged_attention(call)


def _load(name: str) -> Kernel:
    """Triton kernels are imported when a node first needs one: importing tcport must not need Triton."""
    if name == "triton_decode":
        from tcport.kernels.triton_decode import paged_decode

        return paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    return paged_prefill


_register("triton_decode", _takes_decode)
_register("triton_prefill", _takes_varlen)
