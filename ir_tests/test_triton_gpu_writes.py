"""The cache write, the formats it stores and the merge of two states, against the reference on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_kernels import BF16, DECODE, DECODE_TILE, FP16, FP32, attend, merge, write
from paged_cases import FP8, assert_same_caches, build, check, merge_problem, write_problem

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall, MergeCall, WriteCall

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
def test_every_8_bit_float_is_read_and_written_back(kv_dtype: torch.dtype) -> None:
    """All 256 codes: decoded by attending to one key at a time, encoded by writing what torch decodes."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    cache = codes.view(kv_dtype).view(16, 1, 1, 16)
    call = AttentionCall.of(
        torch.zeros(16, 1, 16, device="cuda"), torch.zeros_like(cache.view(torch.uint8)).view(kv_dtype), cache,
        torch.arange(16, device="cuda").view(16, 1), torch.ones(16, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    out, _ = attend(call, DECODE_TILE)
    values = cache.cpu().float().view(-1)
    torch.testing.assert_close(out.cpu().view(-1), values, rtol=0, atol=0, equal_nan=True)

    written = torch.zeros_like(codes).view(kv_dtype).view(16, 1, 1, 16)
    wide = values.cuda().view(16, 1, 16)
    write(WriteCall.of(wide, wide, written, written.clone(), torch.arange(16, device="cuda")))
    limit = torch.finfo(kv_dtype).max
    want = values.clamp(-limit, limit).to(kv_dtype).float()
    torch.testing.assert_close(written.cpu().float().view(-1), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("scales", "layout", "dtype"),
    [
        ("none", "NHD", BF16), ("tensor", "HND", FP32), ("head", "interleaved", FP16), ("token", "packed", BF16),
        ("head", "NHD", torch.float64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kv_dtype", [BF16, FP16, FP32, torch.float64, torch.int8, *FP8], ids=str)
def test_kv_write(kv_dtype: torch.dtype, scales: str, layout: str, dtype: torch.dtype) -> None:
    call, want = write_problem(kv_dtype, scales, layout, "cuda", dtype)
    write(call)
    assert_same_caches(call, want)


@pytest.mark.parametrize(("rows", "warps"), [(1, 1), (2, 1), (4, 1), (8, 2), (32, 8), (32, 1)])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8[0]], ids=str)
def test_kv_write_by_other_tiles(kv_dtype: torch.dtype, rows: int, warps: int) -> None:
    call, want = write_problem(kv_dtype, "none" if kv_dtype == BF16 else "head", "interleaved", "cuda", BF16)
    write(call, TileConfig(rows, 128, warps, 1))
    assert_same_caches(call, want)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=str)
def test_merge_states(dtype: torch.dtype) -> None:
    call, want_out, want_lse = merge_problem(dtype, "cuda")
    out, lse = merge(call)
    tolerance = {BF16: 8e-3, FP16: 1e-3, FP32: 2e-6, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out.cpu(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=min(tolerance, 2e-6), atol=min(tolerance, 2e-6))


def test_merged_halves_are_the_whole() -> None:
    """A sequence attended to in two parts of whole pages, one without the sink, and merged."""
    whole = build(dataclasses.replace(DECODE, lens=(300, 64, 48), dtype=FP32).with_options(sinks=True), "cuda")
    head = dataclasses.replace(whole, seq_lens=torch.full_like(whole.seq_lens, 32), sinks=None)
    tail = dataclasses.replace(whole, seq_lens=whole.seq_lens - 32, block_table=whole.block_table[:, 2:])
    merged = merge(MergeCall.of(*attend(head, DECODE_TILE), *attend(tail, DECODE_TILE)))
    check(whole, *merged, 1e-5)
