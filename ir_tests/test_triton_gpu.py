"""The Triton kernels against the reference on a GPU: options, types, layouts, every edge length, graphs, Inductor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cases import FP8, Case, assert_same_caches, build, check, merge_problem, write_problem

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall
from tcport.testing import LAYOUTS, paged_batches

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
LENS = (37, 0, 300, 1, 129, 16)
Q_LENS = (5, 1, 150, 1, 3, 0)
DECODE = Case(LENS, heads=(8, 2), dims=(64, 64))
VARLEN = Case(LENS, Q_LENS, heads=(8, 2), dims=(64, 64), uncovered=(3, 5))
DECODE_TILE = TileConfig(16, 32, 2, 3)
VARLEN_TILE = TileConfig(64, 32, 4, 2)


@pytest.fixture(autouse=True)
def _poisoned_allocations() -> Iterator[None]:
    """Fill what torch allocates with NaN, so that nothing unwritten can look right."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attend(call: AttentionCall, config: TileConfig) -> tuple[torch.Tensor, torch.Tensor]:
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    entry = paged_decode if call.cu_seqlens_q is None else paged_prefill
    return entry(call, config, lambda kernel: kernel)


def verify(case: Case, config: TileConfig, tolerance: float | None = None) -> None:
    call = build(case, "cuda")
    check(call, *attend(call, config), TOLERANCE[case.dtype] if tolerance is None else tolerance)


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
    config = dataclasses.replace(DECODE_TILE if case.q_lens is None else VARLEN_TILE, num_splits=splits)
    verify(dataclasses.replace(case, dtype=dtype).with_options(**options), config)


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
    config = DECODE_TILE if case.q_lens is None else VARLEN_TILE
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
    config = DECODE_TILE if case.q_lens is None else VARLEN_TILE
    for dtype in DTYPES:
        verify(dataclasses.replace(case, kv_dtype=kv_dtype, scales=scales, dtype=dtype, dims=(64, 96)), config)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
def test_every_8_bit_float_is_read_and_written_back(kv_dtype: torch.dtype) -> None:
    """All 256 codes: decoded by attending to one key at a time, encoded by writing what torch decodes."""
    from tcport.kernels.call import WriteCall
    from tcport.kernels.triton_write import kv_write

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
    kv_write(WriteCall.of(wide, wide, written, written.clone(), torch.arange(16, device="cuda")), lambda kernel: kernel)
    limit = torch.finfo(kv_dtype).max
    want = values.clamp(-limit, limit).to(kv_dtype).float()
    torch.testing.assert_close(written.cpu().float().view(-1), want, rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn], ids=str)
def test_pages_beyond_32_bit_offsets(kv_dtype: torch.dtype) -> None:
    """A request in the last pages of a cache of over 2^31 elements equals the same request in the first pages."""
    from tcport.kernels.call import WriteCall
    from tcport.kernels.triton_write import kv_write

    pages, page, heads, dim = 16386, 64, 8, 256
    shape = (pages, page, heads, dim * kv_dtype.itemsize)
    k, v = (torch.zeros(shape, dtype=torch.uint8, device="cuda").view(kv_dtype) for _ in "kv")
    key, value = (torch.randn(100, heads, dim, device="cuda", dtype=BF16) for _ in "kv")
    query = torch.randn(1, 32, dim, device="cuda", dtype=BF16)
    results = []
    for first, second in ((pages - 1, pages - 2), (0, 1)):
        position = torch.arange(100, device="cuda")
        slots = torch.tensor([first, second], device="cuda")[position // page] * page + position % page
        kv_write(WriteCall.of(key, value, k, v, slots), lambda kernel: kernel)
        table = torch.tensor([[first, second]], dtype=torch.int32, device="cuda")
        lens = torch.tensor([100], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        for cu in (None, starts):
            call = AttentionCall.of(query, k, v, table, lens, cu, return_lse=True)
            results.append(attend(call, TileConfig(16, 32, 4, 2)))
            few_k, few_v = (_pages(cache, [first, second]) for cache in (k, v))
            small = dataclasses.replace(call, k_cache=few_k, v_cache=few_v, block_table=torch.tensor([[0, 1]]))
            check(small, *results[-1], TOLERANCE[BF16])
    for far, near in zip(results[:2], results[2:], strict=True):
        assert torch.equal(far[0], near[0])


def _pages(cache: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return torch.stack([cache[i].view(torch.uint8).cpu() for i in ids]).view(cache.dtype)


def test_the_result_does_not_depend_on_where_pages_lie() -> None:
    one, other = (build(dataclasses.replace(DECODE, dtype=BF16, seed=7), "cuda") for _ in range(2))
    shuffle = torch.randperm(one.k_cache.shape[0], device="cuda")
    moved = torch.empty_like(shuffle)
    moved[shuffle] = torch.arange(len(shuffle), device="cuda")
    inside = one.block_table < len(shuffle)
    table = torch.where(inside, moved[one.block_table.clamp_max(len(shuffle) - 1).long()].int(), one.block_table)
    other = dataclasses.replace(
        other, k_cache=other.k_cache[shuffle], v_cache=other.v_cache[shuffle], block_table=table
    )
    assert torch.equal(attend(one, DECODE_TILE)[0], attend(other, DECODE_TILE)[0])


def test_a_batch_invariant_result_is_the_same_alone_and_in_a_batch() -> None:
    from tcport.ir import BATCH, CeilDiv

    case = dataclasses.replace(DECODE, lens=(300, 37, 129, 1, 64) * 8, dtype=BF16)
    config = dataclasses.replace(DECODE_TILE, num_splits=1 + CeilDiv(64, BATCH))
    batch = build(case.with_options(batch_invariant=True), "cuda")
    out, lse = attend(batch, config)
    for row in range(5):
        one = dataclasses.replace(
            batch, query=batch.query[row : row + 1], block_table=batch.block_table[row : row + 1, :25],
            seq_lens=batch.seq_lens[row : row + 1],
        )  # fmt: skip
        alone, alone_lse = attend(one, config)
        assert torch.equal(out[row], alone[0])
        assert torch.equal(lse[row], alone_lse[0])


def test_two_runs_give_the_same_bits() -> None:
    for case, config in ((DECODE, dataclasses.replace(DECODE_TILE, num_splits=5)), (VARLEN, VARLEN_TILE)):
        call = build(dataclasses.replace(case, dtype=BF16), "cuda")
        first = attend(call, config)
        assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(first, attend(call, config), strict=True))


def test_no_compilation_after_the_first_call_of_a_kind() -> None:
    """Batch size, lengths, table width and offsets into tables select no other binary."""
    from triton import knobs

    compiled: list[object] = []
    case = dataclasses.replace(DECODE, dtype=BF16)

    def run(batch: int, length: int, shift: int) -> None:
        call = build(dataclasses.replace(case, lens=(length,) * batch), "cuda")
        for cu in (None, torch.arange(batch + 1, dtype=torch.int32, device="cuda")):
            table = torch.nn.functional.pad(call.block_table, (shift, 0))[:, shift:]
            lens = torch.nn.functional.pad(call.seq_lens, (shift, 0))[shift:]
            shifted = dataclasses.replace(call, block_table=table, seq_lens=lens, cu_seqlens_q=cu)
            check(shifted, *attend(shifted, dataclasses.replace(DECODE_TILE, num_splits=4)), TOLERANCE[BF16])

    run(4, 64, 0)
    hook, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **kw: compiled.append(kw)
    try:
        for batch, length, shift in itertools.product((1, 2, 3, 16, 17), (1, 16, 17, 400), (0, 1)):
            run(batch, length, shift)
    finally:
        knobs.runtime.jit_post_compile_hook = hook
    assert compiled == []


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


@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_a_captured_graph_follows_lengths_changed_in_place(case: Case) -> None:
    config = dataclasses.replace(DECODE_TILE if case.q_lens is None else VARLEN_TILE, num_splits=2)
    call = build(dataclasses.replace(case, dtype=BF16), "cuda")
    attend(call, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(call, config)
    graph.replay()
    check(call, out, lse, TOLERANCE[BF16])
    call.seq_lens.copy_(torch.tensor([30, 0, 299, 1, 128, 0]))
    if call.cu_seqlens_q is not None:
        call.cu_seqlens_q.copy_(torch.tensor([0, 1, 1, 100, 101, 120, 120]))
    graph.replay()
    check(call, out, lse, TOLERANCE[BF16])


@pytest.mark.parametrize("case", [DECODE, VARLEN], ids=["decode", "varlen"])
def test_compiled_by_inductor_with_symbolic_sizes(case: Case) -> None:
    """The entries traced with ``wrap_triton`` become user-defined kernels of Inductor, one graph for all batches."""
    from tcport.ir import BATCH, CeilDiv

    config = dataclasses.replace(DECODE_TILE, num_splits=1 + CeilDiv(8, BATCH))
    options = {"window": 50, "softcap": 4.0, "sinks": True, "alibi_slopes": True}
    case = dataclasses.replace(case, dtype=BF16, kv_dtype=torch.float8_e4m3fn, scales="token").with_options(**options)
    call = build(case, "cuda")

    @torch.library.triton_op(f"tcport_tests::attend_{'decode' if case.q_lens is None else 'varlen'}", mutates_args={})
    def op(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor,
        cu: torch.Tensor | None, slopes: torch.Tensor, sinks: torch.Tensor, ks: torch.Tensor, vs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        from tcport.kernels.triton_decode import paged_decode
        from tcport.kernels.triton_prefill import paged_prefill

        made = AttentionCall.of(
            q, k, v, table, lens, cu, alibi_slopes=slopes, sinks=sinks, k_scale=ks, v_scale=vs, window=50, softcap=4.0,
            return_lse=True,
        )  # fmt: skip
        return (paged_decode if cu is None else paged_prefill)(made, config, torch.library.wrap_triton)

    compiled = torch.compile(lambda *args: op(*args), dynamic=True, fullgraph=True)
    for lens in (case.lens, case.lens[:3], case.lens * 2):
        q_lens = None if case.q_lens is None else tuple(min(n, 40) for n in lens)
        call = build(dataclasses.replace(case, lens=lens, q_lens=q_lens), "cuda")
        out, lse = compiled(
            call.query, call.k_cache, call.v_cache, call.block_table, call.seq_lens, call.cu_seqlens_q,
            call.alibi_slopes, call.sinks, call.k_scale, call.v_scale,
        )  # fmt: skip
        check(call, out, lse, TOLERANCE[BF16])


@pytest.mark.parametrize(
    ("scales", "layout", "dtype"),
    [
        ("none", "NHD", BF16), ("tensor", "HND", FP32), ("head", "interleaved", FP16), ("token", "packed", BF16),
        ("head", "NHD", torch.float64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kv_dtype", [BF16, FP16, FP32, torch.float64, torch.int8, *FP8], ids=str)
def test_kv_write(kv_dtype: torch.dtype, scales: str, layout: str, dtype: torch.dtype) -> None:
    from tcport.kernels.triton_write import kv_write

    call, want = write_problem(kv_dtype, scales, layout, "cuda", dtype)
    kv_write(call, lambda kernel: kernel)
    assert_same_caches(call, want)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=str)
def test_merge_states(dtype: torch.dtype) -> None:
    from tcport.kernels.triton_merge import merge_states

    call, want_out, want_lse = merge_problem(dtype, "cuda")
    out, lse = merge_states(call, lambda kernel: kernel)
    tolerance = {BF16: 8e-3, FP16: 1e-3, FP32: 2e-6, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out.cpu(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=min(tolerance, 2e-6), atol=min(tolerance, 2e-6))


def test_merged_halves_are_the_whole() -> None:
    """A sequence attended to in two parts of whole pages, one without the sink, and merged."""
    from tcport.kernels.call import MergeCall
    from tcport.kernels.triton_merge import merge_states

    whole = build(dataclasses.replace(DECODE, lens=(300, 64, 48), dtype=FP32).with_options(sinks=True), "cuda")
    head = dataclasses.replace(whole, seq_lens=torch.full_like(whole.seq_lens, 32), sinks=None)
    tail = dataclasses.replace(whole, seq_lens=whole.seq_lens - 32, block_table=whole.block_table[:, 2:])
    merged = merge_states(MergeCall.of(*attend(head, DECODE_TILE), *attend(tail, DECODE_TILE)), lambda kernel: kernel)
    check(whole, *merged, 1e-5)
