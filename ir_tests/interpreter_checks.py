"""Checks of the Triton kernels for Triton's interpreter; run by ``test_triton_interpreter.py`` in a process of its own.

No products in bfloat16 here: the interpreter computes them wrongly. Tiles are large and problems small, because the
interpreter pays per program and per tile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable

import hypothesis
import torch
from hypothesis import strategies as st
from paged_cases import FP8, Case, assert_same_caches, build, check, merge_problem, write_problem
from subprocess_results import report

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall
from tcport.testing import PagedBatch, paged_batches

DECODE = Case((37, 0, 65, 1))
VARLEN = Case((37, 0, 65, 9), q_lens=(5, 1, 40, 0), uncovered=(2, 3))
LONG = Case((1030, 3, 0, 260, 65), heads=(2, 1))
BROAD = TileConfig(16, 128, 4, 1)
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
    "many splits": {"num_splits": 70},  # more than a wide merge reads at once
    "invariant": {"batch_invariant": True},
    "no lse": {"return_lse": False, "scale": 0.3},
}
LAYOUTS = {"HND": (96, 80), "interleaved": (40, 72), "packed": (112, 8), "mla": (80, 64)}


def attention_cases() -> dict[str, tuple[Case, TileConfig, float]]:
    """Name -> (problem, tile, tolerance)."""
    table: dict[str, tuple[Case, TileConfig, float]] = {}
    for name, options in OPTIONS.items():
        table[f"decode, {name}"] = (DECODE.with_options(**options), dataclasses.replace(NARROW, num_splits=2), 1e-5)
        table[f"varlen, {name}"] = (VARLEN.with_options(**options), WIDE, 1e-5)
        cut = dataclasses.replace(LONG.with_options(**options), seed=len(name))
        table[f"decode by length, {name}"] = (cut, dataclasses.replace(BROAD, parts=2), 1e-5)
    for lens in ((2000,), (1100, *(0,) * 5), (1100, *(1,) * 140), (1200, 300, 300), (400,) * 3 + (1025,)):
        table[f"by length, {lens[:4]} of {len(lens)}"] = (Case(lens), dataclasses.replace(BROAD, parts=3), 1e-5)
    for layout, dims in LAYOUTS.items():
        case = dataclasses.replace(DECODE, layout=layout, dims=dims, strided_query=True, heads=(10, 2), page=7)
        table[f"layout {layout}"] = (dataclasses.replace(case, index_dtype=torch.int64), NARROW, 1e-5)
    for dtype, scales in zip((torch.int8, *FP8), ("token", "tensor", "head", "token", "tensor"), strict=True):
        case = dataclasses.replace(DECODE, kv_dtype=dtype, scales=scales, dims=(24, 40))
        table[f"cache {dtype}"] = (case, NARROW, 1e-5)
        # Values of 80 and more dims are read in pairs of dims.
        case = dataclasses.replace(case, dtype=torch.float16, dims=(32, 80))
        table[f"pairs, {dtype}"] = (dataclasses.replace(case, layout="HND"), NARROW, 1e-3)
    for dtype, scales in ((torch.int8, "tensor"), (FP8[0], "none"), (FP8[1], "head")):
        case = dataclasses.replace(DECODE, dtype=torch.bfloat16, kv_dtype=dtype, scales=scales, dims=(80, 128))
        table[f"bf16 query, {dtype}"] = (case.with_options(sinks=True, softcap=4.0), NARROW, 4e-3)
    table["fp16"] = (dataclasses.replace(VARLEN, dtype=torch.float16), WIDE, 2e-3)
    table["fp16 over an fp32 cache"] = (
        dataclasses.replace(DECODE, dtype=torch.float16, kv_dtype=torch.float32), NARROW, 1e-3,
    )  # fmt: skip
    table["group wider than the block"] = (dataclasses.replace(DECODE, heads=(36, 1), page=1), NARROW, 1e-5)
    table["page wider than the tile"] = (dataclasses.replace(DECODE, page=50), NARROW, 1e-5)
    for cut in ({"num_splits": 3}, {"parts": 2}):
        case = dataclasses.replace(LONG, lens=(700, 0, 3), heads=(9, 3), dims=(24, 7))
        table[f"odd heads and dims, {cut}"] = (case, dataclasses.replace(BROAD, **cut), 1e-5)
    table["no sequence"] = (Case(()), NARROW, 1e-5)
    table["no sequence covers a row"] = (Case((), (), uncovered=(0, 3)), WIDE, 1e-5)
    return table


def attention(case: Case, config: TileConfig, tolerance: float) -> None:
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    call = build(case)
    entry = paged_decode if call.cu_seqlens_q is None else paged_prefill
    check(call, *entry(call, config, lambda kernel: kernel), tolerance)


@hypothesis.settings(max_examples=40, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    batch=paged_batches(
        query_dtypes=(torch.float32, torch.float16),
        quantised_dtypes=(torch.int8, *FP8),
        dims=(8, 24, 64, 80),
        max_sequences=3,
        max_length=40,
    ),
    num_splits=st.integers(1, 3),
    parts=st.sampled_from([0, 2, 3]),
)
def any_batch(batch: PagedBatch, num_splits: int, parts: int) -> None:
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    call = AttentionCall.of(**batch.arguments, return_lse=True)
    entry, tile = (paged_decode, NARROW) if call.cu_seqlens_q is None else (paged_prefill, WIDE)
    batch.check(*entry(call, dataclasses.replace(tile, num_splits=num_splits, parts=parts), lambda kernel: kernel))


def write(
    kv_dtype: torch.dtype, scales: str, layout: str, dtype: torch.dtype = torch.float32, tile: TileConfig | None = None
) -> None:
    """Compare the whole cache, byte for byte."""
    from tcport.kernels.triton_write import WRITE_TILE, kv_write

    call, want = write_problem(kv_dtype, scales, layout, dtype=dtype)
    kv_write(call, lambda kernel: kernel, tile or WRITE_TILE)
    assert_same_caches(call, want)


def merge(dtype: torch.dtype) -> None:
    from tcport.kernels.triton_merge import merge_states

    call, want_out, want_lse = merge_problem(dtype)
    out, lse = merge_states(call, lambda kernel: kernel)
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(out, want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, want_lse, rtol=tolerance, atol=tolerance)


def bf16_queries_of_any_size() -> None:
    """They are multiplied in fp16, whose largest number is 65504, with 8-bit keys."""
    from tcport.kernels.triton_decode import paged_decode

    case = dataclasses.replace(DECODE, lens=(37, 20, 65, 9), dtype=torch.bfloat16, kv_dtype=FP8[0], dims=(80, 128))
    call = build(case)
    sizes = torch.tensor([1e-30, 0.0, 1e30, 300.0], dtype=torch.bfloat16)
    call = dataclasses.replace(call, query=call.query * sizes[:, None, None])
    check(call, *paged_decode(call, NARROW, lambda kernel: kernel), 4e-3)


def equal_logits_in_splits(size: float) -> None:
    """Keys that weigh the same, whatever their logit and whichever split they are in: splits of unequal numbers."""
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    one, three = dataclasses.replace(NARROW, num_splits=3), dataclasses.replace(WIDE, num_splits=3)
    parts = dataclasses.replace(BROAD, parts=2)
    for case, tile in ((DECODE, one), (VARLEN, three), (LONG, parts)):
        call = build(case.with_options(causal=False))
        keys = torch.where(call.k_cache.isnan(), call.k_cache, 1.0)
        call = dataclasses.replace(call, query=torch.full_like(call.query, size), k_cache=keys)
        entry = paged_decode if call.cu_seqlens_q is None else paged_prefill
        check(call, *entry(call, tile, lambda kernel: kernel), 1e-6)


def what_no_program_wrote_is_seen() -> None:
    """Debug mode fills memory: a row whose splits, or whose entry of the table of parts, are missing is no number."""
    from tcport import debug
    from tcport.kernels.triton_combine import combine

    for num_splits in (3, None):
        with debug.poisoned():
            out, lse, scratch = torch.empty(2, 3, 7), torch.empty(2, 3), torch.empty(999, dtype=torch.int64)
        combine(scratch, num_splits, out, lse, 4, lambda kernel: kernel)
        assert out.isnan().all()
        assert lse.isnan().all()


def what_is_no_number_stays_where_it_is() -> None:
    """NaN and infinity in a query or a value reach the same outputs in splits and in parts as in one piece."""
    from tcport.kernels.triton_decode import paged_decode

    case = Case((700, 300, 3, 0), dims=(16, 7))
    for name, number in itertools.product(("query", "v_cache"), (torch.nan, torch.inf, -torch.inf)):
        call = build(case)
        changed = getattr(call, name).clone()
        changed[(1, 2, 3) if name == "query" else (int(call.block_table[1, 1]), 2, 1, 3)] = number
        call = dataclasses.replace(call, **{name: changed})
        want = paged_decode(call, BROAD, lambda kernel: kernel)
        assert not want[0].isfinite().all()
        for cut in (dataclasses.replace(BROAD, num_splits=3), dataclasses.replace(BROAD, parts=3)):
            for got, wanted in zip(paged_decode(call, cut, lambda kernel: kernel), want, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def checks() -> dict[str, Callable[[], None]]:
    table: dict[str, Callable[[], None]] = {
        name: functools.partial(attention, *row) for name, row in attention_cases().items()
    }
    table["any batch"] = any_batch
    table["bf16 queries of any size"] = bf16_queries_of_any_size
    table["what no program wrote is seen"] = what_no_program_wrote_is_seen
    table["what is no number stays where it is"] = what_is_no_number_stays_where_it_is
    for size in (1.0, 1e3, -1e3, 1e7, 1e30, -1e30):
        table[f"equal logits in splits, queries of {size:g}"] = functools.partial(equal_logits_in_splits, size)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.int8, *FP8):
        scales = "none" if dtype.itemsize > 1 else "token"
        table[f"write {dtype}"] = functools.partial(write, dtype, scales, "interleaved")
    table["write with a scale per head, head-major"] = functools.partial(write, torch.int8, "head", "HND")
    for rows in (1, 4, 32):
        tile = TileConfig(rows, 128, 1, 1)
        table[f"write, {rows} rows at a time"] = functools.partial(write, FP8[0], "token", "HND", tile=tile)
    table["write int8 from fp64"] = functools.partial(write, torch.int8, "head", "NHD", torch.float64)
    table["write with one scale, packed"] = functools.partial(write, FP8[0], "tensor", "packed")
    for dtype in (torch.float16, torch.float32, torch.float64):
        table[f"merge {dtype}"] = functools.partial(merge, dtype)
    return table


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy on log(0), which is meant
    report(checks())
