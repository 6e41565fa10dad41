"""The C++ kernels of the CPU, ahead of plain PyTorch in the chains of attention and of cache writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport.device import DeviceProfile
from tcport.errors import KernelBuildError
from tcport.ir import AttentionSpec
from tcport.kernels import cpu_library
from tcport.kernels.call import AttentionCall, Launcher, WriteCall
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.registry import Answer, register_lowering
from tcport.lowering.spec import WriteSpec
from tcport.tiling.cpu import CpuTile, cpu_tile


@register_lowering("paged_attention", name="cpp_attention", vendor="cpu", state=cpu_library.state)
def cpp_attention(spec: AttentionSpec, profile: DeviceProfile) -> Answer:
    """Few rows stream past the keys, many rows are matrix products; tasks are shared among torch's threads."""
    if "float64" in (spec.query_dtype, spec.kv_dtype):
        return Verdict.no("fp64: the C++ kernels compute in fp32")
    try:
        library = cpu_library.load()
    except KernelBuildError as error:
        return Verdict.no(str(error))
    tile = cpu_tile(spec, profile)
    why = f"{library.isa}, {torch.get_num_threads()} threads"
    return Candidate("cpp_attention", "tuned", _attend(tile), tile, why, loaded=True)


@register_lowering("kv_write", name="cpp_write", vendor="cpu", state=cpu_library.state)
def cpp_write(spec: WriteSpec, profile: DeviceProfile) -> Answer:
    """One pass over the new rows, shared among torch's threads."""
    if spec.kv_dtype == "float64":
        return Verdict.no("fp64: the C++ kernels store at most fp32")
    try:
        library = cpu_library.load()
    except KernelBuildError as error:
        return Verdict.no(str(error))
    return Candidate("cpp_write", "tuned", _write, why=library.isa, loaded=True)


def _attend(tile: CpuTile) -> Any:
    def run(call: AttentionCall, launch: Launcher) -> tuple[Tensor, Tensor]:
        return torch.ops.tcport_cpu.paged_attention.default(
            call.query,
            call.k_cache,
            call.v_cache,
            call.block_table,
            call.seq_lens,
            call.cu_seqlens_q,
            call.scale,
            call.causal,
            call.window,
            call.softcap,
            call.alibi_slopes,
            call.sinks,
            call.k_scale,
            call.v_scale,
            call.mask,
            call.chunk,
            call.num_splits,
            call.return_lse,
            tile.rows,
            tile.keys,
            tile.stream_rows,
            tile.stream_keys,
            tile.piece,
        )

    return run


def _write(call: WriteCall, launch: Launcher) -> None:
    torch.ops.tcport_cpu.kv_write.default(
        call.key, call.value, call.k_cache, call.v_cache, call.slot_mapping, call.k_scale, call.v_scale
    )
