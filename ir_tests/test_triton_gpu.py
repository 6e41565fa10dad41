"""The attention kernels against the reference on a GPU: options, dtypes, layouts, lengths at every edge."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_kernels import (
    BF16,
    DECODE,
    DECODE_TILE,
    DTYPES,
    FP16,
    FP32,
    TOLERANCE,
    VARLEN,
    VARLEN_TILE,
    attend,
    of_any_size,
    tile_of,
    verify,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cases import FP8, Case, build, check, expected

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall
from tcport.testing import LAYOUTS, paged_batches
from tcport.testing.closeness import assert_close

pytestmark = pytest.mark.gpu

OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "scale": {"scale": 0.7, "return_lse": False},
    "window 1": {"window": 1},
    "window 16": {"window": 16},
    "window 17, not causal": {"window": 17, "causal": False},
    "chunk": {"chunk": 24},
    "chunk, not causal": {"chunk": 32, "causal": False},
    "window and chunk": {"window": 40, "chunk": 64},
    "window beyond 32 bits": {"window": 2**40, "chunk": 2**40},
    "softcap": {"softcap": 2.0},
    "large softcap": {"softcap": 1000.0},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "mask": {"mask": 300},
    "narrow mask": {"mask": 33, "sinks": True},
    "mask and window": {"mask": 150, "window": 60},
    "everything": {
        "mask": 250, "window": 120, "chunk": 200, "softcap": 3.0, "alibi_slopes": True, "sinks": True, "scale": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_options(case: Case, splits: int, options: dict, dtype: torch.dtype) -> None:
    config = dataclasses.replace(tile_of(case), num_splits=splits)
    verify(dataclasses.replace(case, dtype=dtype).with_options(**options), config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"sinks": True, "window": 700}, {"chunk": 256}, {"mask": 900}], ids=str)
@pytest.mark.parametrize(
    "lens", [(3000,), (5000, *(0,) * 9), (1100, *(1,) * 300), (2048,) * 8, (4097, 5, 4096, 1, 900)], ids=sum
)
def test_batches_cut_by_their_lengths(lens: tuple[int, ...], options: dict, dtype: torch.dtype) -> None:
    case = Case(lens, heads=(8, 2), dims=(128, 128), dtype=dtype).with_options(**options)
    for parts in (2, 3, 8):
        verify(case, dataclasses.replace(DECODE_TILE, parts=parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_logits_of_any_size(case: Case, splits: int, dtype: torch.dtype) -> None:
    """Rounding leaves up to 2**-24 of a logit, which is no exponent where the logit is 1e30."""
    call = build(dataclasses.replace(case, dtype=dtype), "cuda")
    check(
        of_any_size(call),
        *attend(of_any_size(call), dataclasses.replace(tile_of(case), num_splits=splits)),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_nan_in_a_query_reaches_its_own_rows_only(case: Case, dtype: torch.dtype) -> None:
    call = build(dataclasses.replace(case, dtype=dtype), "cuda")
    query = call.query.clone()
    query[5, 1, 3] = torch.nan
    call = dataclasses.replace(call, query=query)
    out, _ = attend(call, tile_of(case))
    want, _ = expected(call)
    assert want[5, 1].isnan().all()
    assert want.isnan().sum() == want[5, 1].numel()
    assert_close(out, want, dtype=dtype)


@pytest.mark.parametrize("page", [1, 5, 16, 64, 1056])
@pytest.mark.parametrize(
    "config",
    [TileConfig(16, 16, 1, 2), TileConfig(16, 32, 1, 4), TileConfig(16, 64, 2, 3), TileConfig(16, 128, 4, 2, 4)],
    ids=str,
)
def test_decode_lengths_at_tile_and_page_edges(config: TileConfig, page: int) -> None:
    edges = {n + d for n in (config.block_n, page, 2 * config.block_n, 3 * page) for d in (-1, 0, 1)}
    lens = tuple(sorted({0, 1, *(n for n in edges if n < 1200)}))
    verify(Case(lens, heads=(8, 2), dims=(128, 128), page=page, dtype=BF16), config)


@pytest.mark.parametrize("page", [1, 16, 48])
@pytest.mark.parametrize(
    "config",
    [TileConfig(16, 16, 1, 2), TileConfig(64, 64, 4, 3), TileConfig(128, 64, 8, 2), TileConfig(128, 128, 8, 2)],
    ids=str,
)
def test_query_and_key_lengths_at_tile_edges(config: TileConfig, page: int) -> None:
    tokens, keys = config.block_m // 4, config.block_n
    q_lens = tuple(sorted({0, 1, tokens - 1, tokens, tokens + 1, 2 * tokens, keys, keys + 1}))
    pairs = [(q, q + extra) for q in q_lens for extra in (0, 1, keys - 1, keys)]
    case = Case(tuple(k for _, k in pairs), tuple(q for q, _ in pairs), heads=(8, 2), dims=(128, 128), page=page)
    for options in ({}, {"window": keys + 3}):
        verify(dataclasses.replace(case, dtype=BF16).with_options(**options), config)


HEAD_DIMS = [
    (8, 8), (16, 16), (24, 40), (32, 32), (40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (120, 120), (128, 128),
    (160, 160), (192, 128), (192, 192), (256, 256), (64, 256), (512, 512), (576, 512),
]  # fmt: skip


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_head_dims(case: Case, dims: tuple[int, int]) -> None:
    verify(dataclasses.replace(case, dims=dims, dtype=BF16), TileConfig(16, 32, 4, 2))
    verify(dataclasses.replace(case, dims=dims, dtype=FP32), TileConfig(16, 16, 4, 1))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (10, 2), (12, 2), (28, 4), (9, 1), (71, 1)], ids=str)
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_head_ratios(case: Case, heads: tuple[int, int]) -> None:
    verify(dataclasses.replace(case, heads=heads, dtype=BF16), TileConfig(16, 64, 4, 2))
    verify(dataclasses.replace(case, heads=heads, dtype=BF16), TileConfig(64, 32, 4, 2, 2))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("layout", "dims"), [("HND", (64, 64)), ("interleaved", (80, 64)), ("packed", (64, 40))])
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_layouts(case: Case, layout: str, dims: tuple[int, int], index_dtype: torch.dtype) -> None:
    config = tile_of(case)
    case = dataclasses.replace(case, layout=layout, dims=dims, index_dtype=index_dtype, strided_query=True, page=7)
    verify(dataclasses.replace(case, dtype=BF16, scales="token"), config)


@pytest.mark.parametrize("dims", [(576, 512), (80, 64), (64, 64), (64, 40)], ids=str)
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_values_that_are_a_view_of_keys(case: Case, dims: tuple[int, int]) -> None:
    case = dataclasses.replace(case, layout="mla", heads=(16, 1), dims=dims, dtype=BF16)
    call = build(case, "cuda")
    assert call.v_is_view_of_k
    check(call, *attend(call, TileConfig(16, 32, 4, 2)), TOLERANCE[BF16])


@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("kv_dtype", [*FP8, torch.int8], ids=str)
@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_quantised_caches(case: Case, kv_dtype: torch.dtype, scales: str) -> None:
    config = tile_of(case)
    for dtype in DTYPES:
        verify(dataclasses.replace(case, kv_dtype=kv_dtype, scales=scales, dtype=dtype, dims=(64, 96)), config)


@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_a_16_bit_query_over_a_wider_cache_keeps_the_cache_precision(case: Case) -> None:
    verify(dataclasses.replace(case, dtype=FP16, kv_dtype=FP32), TileConfig(16, 32, 4, 1), 4e-4)


def test_large_logits() -> None:
    verify(dataclasses.replace(VARLEN, dtype=FP32).with_options(scale=20.0), VARLEN_TILE)


@pytest.mark.parametrize("case", [Case(()), Case((0, 0, 0)), Case((0,)), Case((), (), uncovered=(0, 4))], ids=repr)
@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_to_attend_to(case: Case, splits: int) -> None:
    verify(case.with_options(sinks=True), dataclasses.replace(DECODE_TILE, num_splits=splits))
    verify(case, dataclasses.replace(DECODE_TILE, num_splits=splits))


def test_more_queries_than_keys() -> None:
    """The first queries then stand before the first key: they see nothing, or, not causal, everything."""
    case = Case((5, 0, 40), (9, 3, 64), heads=(8, 2), dtype=BF16)
    for options in ({}, {"causal": False}, {"causal": False, "chunk": 8}, {"window": 3}):
        verify(case.with_options(**options), VARLEN_TILE)


@pytest.mark.parametrize("splits", [2, 7, 16, 33, 300])
def test_any_number_of_splits_agrees(splits: int) -> None:
    verify(dataclasses.replace(DECODE, dtype=FP32).with_options(num_splits=splits, sinks=True), DECODE_TILE)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything_at_all(layout: str, data: st.DataObject) -> None:
    """Random batches with options, dtypes, lengths and strides in any combination, poison around every live byte."""
    batch = data.draw(paged_batches(layouts=[layout])).to("cuda")
    config = data.draw(
        st.sampled_from([TileConfig(16, 16, 2, 3, 2), TileConfig(32, 64, 4, 2), TileConfig(64, 32, 4, 1)])
    )
    batch.check(*attend(AttentionCall.of(**batch.arguments, return_lse=True), config))
