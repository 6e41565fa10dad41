"""Compiles of the Triton kernels for GPUs that are not here; ``test_triton_compile.py`` runs them in one subprocess."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import warnings
from collections.abc import Callable

import torch
from paged_cases import FP8, Case, build, merge_problem, write_problem
from subprocess_results import report

from tcport.ir import TileConfig

# Backend, architecture, warp width, and shared memory of one CTA in bytes: CUDA C++ programming guide, table of
# technical specifications per compute capability; 64 KiB of LDS per workgroup on CDNA3 and RDNA3 (their ISA guides).
TARGETS = {
    "sm_75": ("cuda", 75, 32, 64 * 1024),
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_86": ("cuda", 86, 32, 99 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
    "gfx1100": ("hip", "gfx1100", 32, 64 * 1024),
}

DECODE = Case((37, 64), heads=(32, 8), dims=(128, 128), dtype=torch.bfloat16)
VARLEN = dataclasses.replace(DECODE, q_lens=(5, 64))
MLA = dataclasses.replace(DECODE, heads=(16, 1), dims=(576, 512), layout="mla")
EVERYTHING = {"window": 40, "chunk": 24, "softcap": 5.0, "alibi_slopes": True, "sinks": True, "mask": 50}
SOFT_WINDOW = dataclasses.replace(VARLEN, dims=(80, 80)).with_options(window=100, softcap=5.0)
QUANTISED = dataclasses.replace(DECODE, kv_dtype=torch.float8_e4m3fn, scales="token", dims=(96, 64), heads=(10, 2))
LONG = dataclasses.replace(DECODE, lens=(1100, 30))
BROAD = TileConfig(16, 64, 4, 1)
IN_PAIRS = dataclasses.replace(QUANTISED, dims=(96, 128), scales="head")
FP16, FP32 = (dataclasses.replace(DECODE, dtype=dtype) for dtype in (torch.float16, torch.float32))

ATTENTION: dict[str, tuple[Case, TileConfig, str]] = {
    "decode": (DECODE, TileConfig(16, 64, 2, 3, 4), "sm_90 sm_80 gfx942"),
    "decode, small tile": (FP16, TileConfig(16, 16, 2, 2), "sm_75 gfx1100"),
    "decode, fp32": (FP32, TileConfig(16, 32, 4, 2), "sm_86"),
    "decode, mla": (MLA, TileConfig(16, 32, 4, 2), "sm_90 gfx942"),
    "decode, everything": (QUANTISED.with_options(**EVERYTHING), TileConfig(16, 32, 4, 2), "sm_80 gfx942"),
    "prefill": (VARLEN, TileConfig(128, 64, 8, 2), "sm_90 sm_80"),
    "prefill, small tile": (VARLEN, TileConfig(64, 32, 4, 2), "sm_86 gfx942"),
    "prefill, window": (SOFT_WINDOW, TileConfig(64, 64, 4, 2), "sm_90"),
}


def checks() -> dict[str, Callable[[], None]]:
    table: dict[str, Callable[[], None]] = {}
    for name, (case, config, targets) in ATTENTION.items():
        for target in targets.split():
            table[f"{name}, {target}"] = functools.partial(attention, case, config, target)
    table["write, sm_80"] = functools.partial(write, torch.float8_e4m3fn, "sm_80")
    table["write, gfx942"] = functools.partial(write, torch.float8_e4m3fnuz, "gfx942")
    table["write, fp64"] = functools.partial(write, torch.int8, "sm_80", torch.float64)
    table["merge, fp64"] = functools.partial(merge, "sm_90", torch.float64)
    for dtype in FP8:
        case = dataclasses.replace(QUANTISED, kv_dtype=dtype, scales="head")
        table[f"decode, {dtype}"] = functools.partial(attention, case, TileConfig(16, 32, 4, 1), "sm_86")
        case = dataclasses.replace(IN_PAIRS, kv_dtype=dtype)
        table[f"decode in pairs, {dtype}"] = functools.partial(attention, case, TileConfig(16, 32, 2, 2), "sm_80")
        table[f"decode in pairs, {dtype}, gfx942"] = functools.partial(attention, case, BROAD, "gfx942")
    table["fp8 conversion"] = the_hardware_converts_where_it_can
    table["no value comes by the byte"] = no_value_comes_by_the_byte
    table["the merge waits for what it merges"] = the_merge_waits_for_what_it_merges
    for name, case in {
        "decode": DECODE,
        "everything": VARLEN.with_options(**EVERYTHING),
        "mla": MLA,
        "in pairs": IN_PAIRS,
        "in parts": LONG,
    }.items():
        table[f"mutations, {name}"] = functools.partial(only_the_results_are_mutated, case)
    return table


def attention(case: Case, config: TileConfig, target: str) -> None:
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    _compile(target, paged_decode if case.q_lens is None else paged_prefill, build(case), config)


def the_hardware_converts_where_it_can() -> None:
    """PTX ISA: ``cvt.rn.f16x2.e4m3x2`` needs sm_89."""
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting
    from tcport.kernels.triton_decode import paged_decode

    case = dataclasses.replace(QUANTISED, scales="head")
    for arch in (86, 89, 90):
        target = GPUTarget("cuda", arch, 32)
        with targeting(target):
            launch = record(paged_decode, build(case), TileConfig(16, 32, 4, 1, 1))[0]
        assert ("cvt.rn.f16x2.e4m3x2" in compile_launch(launch, target).asm["ptx"]) == (arch >= 89)


def no_value_comes_by_the_byte() -> None:
    """From shared memory to a matrix unit: neither values, by column, nor keys."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        (attend,) = _ptx(90, dataclasses.replace(IN_PAIRS, kv_dtype=dtype), TileConfig(16, 32, 1, 3))
        assert "ldmatrix" in attend
        assert not re.search(r"ld\.shared\.[bus]8", attend)


def the_merge_waits_for_what_it_merges() -> None:
    """``griddepcontrol.wait`` stands before all reads; PTX has it from sm_90 on."""
    for splits in (TileConfig(16, 32, 4, 2, 3), TileConfig(16, 32, 1, 2, 33), TileConfig(16, 32, 4, 2, parts=3)):
        attend, merge = _ptx(90, LONG, splits)
        assert "griddepcontrol.launch_dependents" in attend
        assert "griddepcontrol.wait" not in attend
        before, after = merge.split("griddepcontrol.wait")
        assert "ld.global" not in before
        assert "st.global" not in before
        assert "ld.global" in after
    for arch, config, traced in ((80, splits, False), (90, splits, True), (90, TileConfig(16, 32, 4, 2), False)):
        assert not any("griddepcontrol" in text for text in _ptx(arch, LONG, config, traced=traced))


def only_the_results_are_mutated(case: Case) -> None:
    """What torch finds a kernel to mutate: an input among it would be cloned, or take a graph off CUDA graphs."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.offline import record
    from tcport.kernels.target import targeting
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    entry = paged_decode if case.q_lens is None else paged_prefill
    of_launches = []
    with targeting(GPUTarget("cuda", 90, 32)):
        for tile in (TileConfig(16, 32, 4, 2), TileConfig(16, 32, 4, 2, 2), TileConfig(16, 32, 4, 2, parts=2)):
            for launch in record(entry, build(case), tile, traced=True):
                if hasattr(wrap, "identify_accessed_tensors"):
                    accesses = wrap.identify_accessed_tensors(launch.kernel, dict(launch.arguments), {})
                    written = {access.name for access in accesses.read_writes.writes}
                else:
                    written = set(wrap.identify_mutated_tensors(launch.kernel, dict(launch.arguments), {}))
                of_launches.append(written)
    results, first = {"out", "lse"}, {"scratch"}
    in_parts = [results | first, results] if case == LONG else [results]
    assert of_launches == [results, first, results, *in_parts], of_launches


def write(dtype: torch.dtype, target: str, source: torch.dtype = torch.bfloat16) -> None:
    from tcport.kernels.triton_write import kv_write

    _compile(target, kv_write, write_problem(dtype, "head", "HND", dtype=source)[0])


def merge(target: str, dtype: torch.dtype) -> None:
    from tcport.kernels.triton_merge import merge_states

    _compile(target, merge_states, merge_problem(dtype)[0])


def _ptx(arch: int, case: Case, config: TileConfig, *, traced: bool = False) -> list[str]:
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting
    from tcport.kernels.triton_decode import paged_decode

    target = GPUTarget("cuda", arch, 32)
    with targeting(target):
        launches = record(paged_decode, build(case), config, traced=traced)
    return [compile_launch(launch, target).asm["ptx"] for launch in launches]


def _compile(target: str, entry: Callable[..., object], *args: object) -> None:
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting

    *names, limit = TARGETS[target]
    with targeting(GPUTarget(*names)):
        launches = record(entry, *args)
    assert launches
    for launch in launches:
        shared = compile_launch(launch, GPUTarget(*names)).metadata.shared
        assert shared <= limit, f"{launch.kernel.__name__} needs {shared} of {limit} bytes of shared memory"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    report({name: check for name, check in checks().items() if not wanted or name in wanted})
