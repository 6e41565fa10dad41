"""Precompiled kernels as links of the chain: before plain PyTorch, and used wherever no compiler works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tcport.bundle.facts import facts_of
from tcport.bundle.manifest import Entry
from tcport.bundle.store import bundles, named_folders
from tcport.device import DeviceProfile, device_profile
from tcport.errors import BundleError, NoCandidateError, NoTileError
from tcport.ir import AttentionSpec, TileConfig
from tcport.kernels.call import AttentionCall, Launcher, WriteCall, is_traced
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.registry import Answer, generation, register_lowering, select
from tcport.lowering.spec import WriteSpec, attention_spec, opened, write_spec
from tcport.operator_library import define_twin
from tcport.tiling import rank_tiles
from tcport.tiling.footprint import compile_target
from tcport.tiling.sources import kernel_sources


@register_lowering("paged_attention", name="bundle_attention")
def bundle_attention(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """The Triton attention kernels, compiled before."""
    return _answer("bundle_attention", spec, profile)


@register_lowering("kv_write", name="bundle_write")
def bundle_write(spec: WriteSpec, profile: DeviceProfile) -> Answer:
    """The Triton write kernel, compiled before."""
    return _answer("bundle_write", spec, profile)


def _answer(name: str, spec: AttentionSpec | WriteSpec, profile: DeviceProfile) -> Answer:
    found, faults = bundles()
    if not found:
        return Verdict.no("; ".join(faults) or "no bundle is loaded (TCPORT_BUNDLE names folders)")
    from tcport.bundle.launch import BundleLauncher  # it imports Triton

    reasons = list(faults)
    candidates: list[Candidate] = []
    wanted = facts_of(spec)
    for bundle in found:
        refusal = bundle.refusal(profile, compile_target(profile), kernel_sources())
        if refusal is not None:
            reasons.append(refusal)
            continue
        tiles: dict[TileConfig, list[Entry]] = {}
        for entry in bundle.entries:
            if entry.kernel == _KERNELS[type(spec)](spec) and dict(entry.facts) == wanted:
                tiles.setdefault(_tile(entry), []).append(entry)
        for tile, entries in tiles.items():
            config = _with_splits(tile, spec, profile)
            candidates.append(Candidate(name, "blob", _runner(name, config, BundleLauncher(bundle, entries)), config))
        if not tiles:
            reasons.append(f"{bundle.folder} has no kernel for this spec")
    return candidates or Verdict.no("; ".join(reasons))


def _tile(entry: Entry) -> TileConfig:
    tile = entry.tile
    return TileConfig(tile["block_m"], tile["block_n"], tile["num_warps"], tile["num_stages"])


def _with_splits(tile: TileConfig, spec: AttentionSpec | WriteSpec, profile: DeviceProfile) -> TileConfig:
    """The tile with the number of splits that suits this device and batch; the compiled code takes any."""
    if not isinstance(spec, AttentionSpec):
        return tile
    sizes = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages)
    try:
        ranked = rank_tiles(spec, profile).configs
    except NoTileError:
        return tile
    same = (c for c in ranked if (c.block_m, c.block_n, c.num_warps, c.num_stages) == sizes)
    return next(same, tile)


def _runner(name: str, config: TileConfig, launcher: Launcher) -> Callable[[Any, Launcher], Any]:
    tile = str(config.uncut)

    def run(call: AttentionCall | WriteCall, launch: Launcher) -> Any:
        if is_traced(launch):
            return _call_twin(name, call, tile)
        return _entry(call)(call, launch=launcher, config=config)

    return run


def _entry(call: AttentionCall | WriteCall) -> Callable[..., Any]:
    if isinstance(call, WriteCall):
        from tcport.kernels.triton_write import kv_write

        return kv_write
    if call.cu_seqlens_q is None:
        from tcport.kernels.triton_decode import paged_decode

        return paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    return paged_prefill


def _call_twin(name: str, call: AttentionCall | WriteCall, tile: str) -> Any:
    """In traced code a launch through the driver is one opaque operator, told which of the bundles' tiles to run."""
    values = vars(call)
    positional = _POSITIONAL[name]
    options = {key: value for key, value in values.items() if key not in positional}
    return getattr(torch.ops.tcport, name).default(*(values[key] for key in positional), **options, tile=tile)


def _run_attention(*args: Any, tile: str, **options: Any) -> Any:
    call = AttentionCall.of(*args, **options)
    spec, profile = attention_spec(call), device_profile(call.query.device)
    return _kernel("paged_attention", "bundle_attention", spec, profile, tile)(call)


def _run_write(*args: Any, tile: str, **options: Any) -> None:
    call = WriteCall.of(*args, **options)
    _kernel("kv_write", "bundle_write", write_spec(call), device_profile(call.key.device), tile)(call)


def _kernel(op: str, name: str, spec: Any, profile: DeviceProfile, tile: str) -> Callable[[Any], Any]:
    candidate = _chosen(op, name, opened(spec), profile, tile, (generation(), named_folders()))
    return lambda call: candidate.run(call, lambda kernel: kernel)


@functools.lru_cache(maxsize=1024)
def _chosen(op: str, name: str, spec: Any, profile: DeviceProfile, tile: str, state: object) -> Candidate:
    try:
        candidates = select(op, spec, profile, kernel=name).candidates
    except NoCandidateError as error:
        raise BundleError(f"No bundle in use has the kernel of a graph: {error.cause}", error.remedy) from error
    for candidate in candidates:
        if str(candidate.uncut.config) == tile:
            return candidate
    raise BundleError(f"No bundle in use holds {name} {tile}.", "Name the bundle that the graph was compiled with.")


_KERNELS: dict[type, Callable[[Any], str]] = {
    AttentionSpec: lambda spec: "triton_decode" if spec.form == "decode" else "triton_prefill",
    WriteSpec: lambda spec: "triton_write",
}
_POSITIONAL = {
    "bundle_attention": ("query", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q"),
    "bundle_write": ("key", "value", "k_cache", "v_cache", "slot_mapping"),
}
define_twin("bundle_attention", "paged_attention", _run_attention, more="str tile")
define_twin("bundle_write", "kv_write", _run_write, more="str tile")
