"""Checks of the Triton kernels for Triton's interpreter; run by ``test_triton_interpreter.py`` in a process of its own.

No bfloat16 here: the interpreter computes it wrongly. Tiles are large and problems small, because the interpreter pays
per program and per tile.
"""

from __future__ import annotations

import dataclasses
import warnings

import torch
from paged_cases import FP8, Case, build, check
from subprocess_results import report

from tcport.ir import TileConfig

DECODE = Case((37, 0, 65, 1))
VARLEN = Case((37, 0, 65, 9), q_lens=(5, 1, 40, 0), uncovered=(2, 3))
NARROW, WIDE = TileConfig(16, 32, 4, 1), TileConfig(64, 32, 4, 1)

OPTIONS = {
    "plain": {},
    "window 1": {"window": 1},
    "window and softcap": {"window": 20, "softcap": 3.0},
    "large softcap": {"softcap": 1000.0},
    "chunk": {"chunk": 10},
    "alibi and sinks": {"alibi_slopes": True, "sinks": True},
    "not causal": {"causal": False, "window": 30, "chunk": 24},
    "mask": {"mask": 40, "window": 20, "sinks": True},
    "splits": {"num_splits": 3, "sinks": True},
    "invariant": {"batch_invariant": True},
    "no lse": {"return_lse": False, "scale": 0.3},
}
LAYOUTS = {"HND": (96, 80), "interleaved": (40, 72), "packed": (112, 8), "mla": (80, 64)}


def cases() -> dict[str, tuple[Case, TileConfig, float]]:
    """Name -> (problem, tile, tolerance)."""
    table: dict[str, tuple[Case, TileConfig, float]] = {}
    for name, options in OPTIONS.items():
        table[f"decode, {name}"] = (DECODE.with_options(**options), dataclasses.replace(NARROW, num_splits=2), 1e-5)
        table[f"varlen, {name}"] = (VARLEN.with_options(**options), WIDE, 1e-5)
    for layout, dims in LAYOUTS.items():
        case = dataclasses.replace(DECODE, layout=layout, dims=dims, strided_query=True, heads=(10, 2), page=7)
        table[f"layout {layout}"] = (dataclasses.replace(case, index_dtype=torch.int64), NARROW, 1e-5)
    for dtype, scales in zip((torch.int8, *FP8), ("token", "tensor", "head", "token", "tensor"), strict=True):
        case = dataclasses.replace(DECODE, kv_dtype=dtype, scales=scales, dims=(24, 40))
        table[f"cache {dtype}"] = (case, NARROW, 1e-5)
    table["fp16"] = (dataclasses.replace(VARLEN, dtype=torch.float16), WIDE, 2e-3)
    table["fp16 over an fp32 cache"] = (
        dataclasses.replace(DECODE, dtype=torch.float16, kv_dtype=torch.float32), NARROW, 1e-3,
    )  # fmt: skip
    table["group wider than the block"] = (dataclasses.replace(DECODE, heads=(36, 1), page=1), NARROW, 1e-5)
    table["page wider than the tile"] = (dataclasses.replace(DECODE, page=50), NARROW, 1e-5)
    table["no sequence"] = (Case(()), NARROW, 1e-5)
    table["no sequence covers a row"] = (Case((), (), uncovered=(0, 3)), WIDE, 1e-5)
    return table


def attention(case: Case, config: TileConfig, tolerance: float) -> None:
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    call = build(case)
    entry = paged_decode if call.cu_seqlens_q is None else paged_prefill
    check(call, *entry(call, config, lambda kernel: kernel), tolerance)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy on log(0), which is meant
    report({name: lambda row=row: attention(*row) for name, row in cases().items()})
