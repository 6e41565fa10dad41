"""Building a bundle: the best tiles of each spec, compiled for a device that need not be there."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tcport.bundle.facts import facts_of
from tcport.bundle.manifest import ABI, Bundle, Entry, write_bundle
from tcport.device.profile import DeviceProfile
from tcport.errors import BundleError, KernelBuildError
from tcport.fingerprint import triton_version
from tcport.ir import TOKENS, AttentionSpec, TileConfig
from tcport.kernels import cpu_library
from tcport.lowering.spec import WriteSpec
from tcport.lowering.targets import target_of
from tcport.tiling import rank_tiles, rank_write_tiles
from tcport.tiling.footprint import ENTRIES, compile_target
from tcport.tiling.limits import limits_of
from tcport.tiling.sources import kernel_sources
from tcport.tiling.wire import config_data, spec_data
from tcport.tiling.workers import Worker

_EXTENSIONS = {"cuda": "cubin", "hip": "hsaco"}


def build_bundle(
    specs: Sequence[AttentionSpec],
    profile: DeviceProfile,
    folder: str | Path,
    *,
    tiles: int = 2,
    index_dtype: str = "int32",
) -> tuple[Bundle, list[str]]:
    """Compile the attention of each spec and the write that fills its cache, and write the bundle.

    Args:
        tiles: how many of the best tiles to keep for each spec.
        index_dtype: dtype of block table, lengths and query bounds of the calls to come.

    Returns:
        The bundle, and one sentence for each tile that was left out.

    Raises:
        BundleError: there is no compiler for the device, or nothing compiled.
    """
    target = compile_target(profile)
    if target is None:
        raise BundleError(
            f"Triton has no offline compiler for {profile.vendor} {profile.arch}.",
            "Build for an NVIDIA or AMD GPU, or for cpu.",
        )
    left_out: list[str] = []
    entries: list[Entry] = []
    binaries: dict[str, bytes] = {}
    with contextlib.closing(Worker("tcport.bundle.build_worker")) as worker:
        for spec in specs:
            kept: set[TileConfig] = set()
            for job in _jobs(spec, profile):
                if job.kernel != "triton_write" and job.tile not in kept and len(kept) >= tiles:
                    break
                answer = worker.ask({**job.request, "target": list(target), "index_dtype": index_dtype})
                trouble = answer.get("error") or _too_big(answer["entries"], profile)
                if trouble:
                    left_out.append(f"{job.kernel} {job.tile}: {trouble}")
                    continue
                if job.kernel != "triton_write":
                    kept.add(job.tile)
                entries += [_take(job, compiled, target[0], binaries) for compiled in answer["entries"]]
    if not entries:
        raise BundleError(f"Nothing compiled: {'; '.join(left_out)}.", "Look at the reasons above.")
    unique = tuple({json.dumps(dataclasses.asdict(entry), sort_keys=True): entry for entry in entries}.values())
    try:
        cpu = _take_cpu_library(binaries)
    except KernelBuildError as error:
        cpu = None
        left_out.append(f"kernels of the CPU: {error}")
    name = profile.name or profile.arch or ""
    bundle = Bundle(Path(folder), ABI, target, kernel_sources(), triton_version(), name, unique, cpu)
    write_bundle(bundle, binaries)
    return bundle, left_out


def build_cpu_bundle(folder: str | Path) -> Bundle:
    """Write a bundle of the CPU's kernels alone, for machines of this architecture and torch version.

    Raises:
        KernelBuildError: there is no C++ compiler, or it failed.
    """
    binaries: dict[str, bytes] = {}
    cpu = _take_cpu_library(binaries)
    target = ("cpu", platform.machine(), 0)
    bundle = Bundle(Path(folder), ABI, target, kernel_sources(), triton_version(), "cpu", (), cpu)
    write_bundle(bundle, binaries)
    return bundle


def _take_cpu_library(binaries: dict[str, bytes]) -> dict[str, str]:
    path = cpu_library.build()
    data = binaries[path.name] = path.read_bytes()
    return {
        "file": path.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "identity": cpu_library.identity(),
    }


@dataclasses.dataclass(frozen=True)
class _Job:
    """One compile: a tile of a kernel, whole (one split) or cut."""

    kernel: str
    tile: TileConfig
    facts: dict[str, Any]
    request: dict[str, Any]


def _jobs(spec: AttentionSpec, profile: DeviceProfile) -> Iterable[_Job]:
    kernel = "triton_decode" if spec.form == "decode" else "triton_prefill"
    write = WriteSpec(
        TOKENS, spec.num_kv_heads, spec.head_dim_qk, spec.head_dim_v, spec.query_dtype, spec.kv_dtype,
        spec.k_layout, spec.v_layout, spec.kv_scales,
    )  # fmt: skip
    request = {"op": "kv_write", "entry": "tcport.kernels.triton_write:kv_write", "spec": spec_data(spec)}
    tile = rank_write_tiles(write, profile).configs[0]
    yield _Job("triton_write", tile, facts_of(write), {**request, **_tile_data(tile, {})})
    request = {"op": "paged_attention", "entry": ENTRIES[kernel.removeprefix("triton_")], "spec": spec_data(spec)}
    target = target_of(profile)
    for tile in rank_tiles(spec, profile).configs:
        options = dict(target.options(spec, tile))
        # Whole, cut into equal numbers, few and many, and cut by the lengths where the kernel can.
        cuts = [(1, 0), (4, 0), (32, 0), *([(4, 4)] if tile.parts != 0 else [])]
        for splits, parts in cuts:
            sized = dataclasses.replace(tile, num_splits=splits, parts=parts)
            yield _Job(kernel, tile, facts_of(spec), {**request, **_tile_data(sized, options)})


def _tile_data(tile: TileConfig, options: dict[str, Any]) -> dict[str, Any]:
    return {"config": config_data(tile), "options": options}


def _too_big(compiled: list[dict[str, Any]], profile: DeviceProfile) -> str | None:
    limits = limits_of(profile)
    for kernel in compiled:
        if kernel["shared"] > limits.shared_per_cta:
            return f"{kernel['function']} needs {kernel['shared']} bytes of shared memory of {limits.shared_per_cta}"
        if kernel["threads"] > limits.threads_per_cta:
            return f"{kernel['function']} needs {kernel['threads']} threads of {limits.threads_per_cta}"
    return None


def _take(job: _Job, compiled: dict[str, Any], backend: str, binaries: dict[str, bytes]) -> Entry:
    data = base64.b64decode(compiled.pop("binary"))
    digest = hashlib.sha256(data).hexdigest()
    name = f"{compiled['function']}-{digest[:16]}.{_EXTENSIONS[backend]}"
    binaries[name] = data
    tile = {name: getattr(job.tile, name) for name in ("block_m", "block_n", "num_warps", "num_stages")}
    aligned = tuple(compiled.pop("aligned"))
    return Entry(kernel=job.kernel, tile=tile, facts=job.facts, aligned=aligned, file=name, sha256=digest, **compiled)
