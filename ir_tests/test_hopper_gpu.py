"""The kernel for Hopper on one: against the reference at every edge, compiled, in graphs, and where it stands aside."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gpu_kernels import BF16, FP16, TOLERANCE, of_any_size
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cases import Case, build, check, expected
from torch import Tensor

import tcport
from tcport.device import device_profile
from tcport.errors import NoCandidateError
from tcport.ir import TileConfig
from tcport.kernels import reference
from tcport.kernels.call import AttentionCall
from tcport.kernels.hopper_prefill import hopper_prefill, misfit
from tcport.lowering import hopper
from tcport.lowering.operators import PAGED_ATTENTION
from tcport.lowering.spec import attention_spec, opened
from tcport.tiling.hopper import rank_hopper_tiles

pytestmark = pytest.mark.gpu

LENS = (37, 0, 300, 1, 129, 16)
Q_LENS = (5, 1, 150, 1, 3, 0)
CASE = Case(LENS, Q_LENS, heads=(8, 2), dims=(128, 128), dtype=BF16, uncovered=(3, 5))
UNITS = (None, 1, 5)
"""Multiprocessors that there are said to be: every block has its own CTA, one CTA takes all, a few take many each."""


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    arch = device_profile(torch.device("cuda")).arch or ""
    if not arch.startswith("sm_90"):
        pytest.skip(f"the kernel is for sm_90, this is {arch}")


def verify(case: Case, tile: TileConfig | None = None) -> None:
    call = build(case, "cuda")
    assert misfit(call) is None
    tile = tile or rank_hopper_tiles(attention_spec(call), device_profile(call.query.device)).configs[0]
    want = expected(call)
    for units in UNITS:
        check(call, *hopper_prefill(call, tile, lambda kernel: kernel, units), TOLERANCE[case.dtype], want)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"causal": False}, {"scale": -0.1}, {"scale": 0.0}], ids=str)
def test_options(dim: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    verify(dataclasses.replace(CASE, dims=(dim, dim), dtype=dtype).with_options(**options))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_logits_of_any_size(dim: int, dtype: torch.dtype) -> None:
    call = of_any_size(build(dataclasses.replace(CASE, dims=(dim, dim), dtype=dtype), "cuda"))
    tile = rank_hopper_tiles(attention_spec(call), device_profile(call.query.device)).configs[0]
    want = expected(call)
    for units in UNITS:
        check(call, *hopper_prefill(call, tile, lambda kernel: kernel, units), TOLERANCE[dtype], want)


@pytest.mark.parametrize("size", [0.3, 7.7, -3e4, 3e8, -3e8, 1e18, -1e30])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_equal_logits_of_any_size_weigh_the_same_in_every_tile(dim: int, size: float) -> None:
    """Neither rounding on one side nor on the other may take weight from the maximum, or grow with the tiles."""
    call = build(Case((1500,), (150,), heads=(8, 2), dims=(dim, dim), dtype=BF16).with_options(causal=False), "cuda")
    keys = torch.where(call.k_cache.isnan(), call.k_cache, 1.0)
    call = dataclasses.replace(call, query=torch.full_like(call.query, size), k_cache=keys)
    tile = rank_hopper_tiles(attention_spec(call), device_profile(call.query.device)).configs[0]
    out, _ = hopper_prefill(call, tile, lambda kernel: kernel, 5)
    pages = call.block_table[0, : -(-1500 // 16)].long()
    mean = call.v_cache[pages].flatten(0, 1)[:1500].double().mean(0)  # [KV heads, dim]
    want = mean.repeat_interleave(4, 0).expand(150, 8, dim)
    assert (out.double() - want).norm() <= TOLERANCE[BF16] * want.norm()


@pytest.mark.parametrize("window", [1, 15, 16, 17, 128, 129])
def test_windows_at_the_edges_of_boxes_and_tiles(window: int) -> None:
    verify(CASE.with_options(window=window))
    verify(CASE.with_options(window=window, causal=False))


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128, 256, 544, 1056])
def test_pages(page: int) -> None:
    verify(dataclasses.replace(CASE, page=page))


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "packed"])
def test_layouts(layout: str) -> None:
    verify(dataclasses.replace(CASE, layout=layout, index_dtype=torch.int64, strided_query=True))


@pytest.mark.parametrize("heads", [(2, 2), (5, 1), (14, 2), (128, 1), (64, 2)], ids=str)
def test_groups(heads: tuple[int, int]) -> None:
    verify(dataclasses.replace(CASE, heads=heads))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 127, 128, 129, 255, 256, 257, 384, 2049])
def test_lengths_at_the_edges_of_boxes_and_tiles(length: int) -> None:
    verify(dataclasses.replace(CASE, lens=(length,), q_lens=(min(length, 33),), uncovered=(0, 0)))


def test_every_tile_that_may_be_chosen() -> None:
    for dim in (64, 128, 256):
        case = dataclasses.replace(CASE, dims=(dim, dim))
        spec = attention_spec(build(case))
        for tile in rank_hopper_tiles(spec, device_profile(torch.device("cuda"))).configs:
            verify(case, tile)


@pytest.mark.parametrize("few", [1, 15, 16, 17], ids=lambda few: f"{few} tokens")
@pytest.mark.parametrize("heads", [(8, 2), (64, 1), (128, 1)], ids=str)
def test_rows_of_one_group_alone_and_blocks_from_both_ends(few: int, heads: tuple[int, int]) -> None:
    """Blocks of at most 64 rows are one group's; a batch that begins with such is taken from both ends."""
    tokens = (few, 1, 40, 0, 3, few, 300, few)
    for q_lens in (tokens, tokens[::-1], (few,) * 8):
        lens = tuple(200 + 150 * at for at in range(8))
        verify(dataclasses.replace(CASE, lens=lens, q_lens=q_lens, heads=heads))
        verify(dataclasses.replace(CASE, lens=(0, *lens[1:-1], 0), q_lens=q_lens, heads=heads).with_options(window=70))


def test_launches_that_are_under_way_together_deal_out_their_own_blocks() -> None:
    """Several streams, and replays of graphs beside them: a counter that two launches shared would lose blocks."""
    call = build(Case((900, 700, 300), (900, 700, 257), heads=(32, 8), dims=(128, 128), dtype=BF16), "cuda")
    tile = rank_hopper_tiles(attention_spec(call), device_profile(call.query.device)).configs[0]

    def attend() -> tuple[Tensor, Tensor]:
        return hopper_prefill(call, tile, lambda kernel: kernel, 20)

    want = expected(call)
    check(call, *attend(), TOLERANCE[BF16], want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attend()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                results.append(attend())
        torch.cuda.synchronize()
        for result in (replayed, *results):
            check(call, *result, TOLERANCE[BF16], want)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences of any lengths, with more query tokens than keys and without any, in few forms that are compiled."""
    lengths = st.integers(0, 40) | st.integers(0, 700)
    sequences = draw(st.lists(st.tuples(lengths, st.integers(0, 20) | st.integers(0, 300)), min_size=1, max_size=9))
    case = Case(
        tuple(keys for keys, _ in sequences),
        tuple(tokens for _, tokens in sequences),
        heads=draw(st.sampled_from([(8, 2), (5, 1)])),
        dims=draw(st.sampled_from([(64, 64), (128, 128)])),
        page=draw(st.sampled_from([16, 544])),
        dtype=BF16,
        uncovered=draw(st.tuples(st.integers(0, 70), st.integers(0, 70))),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        seed=draw(st.integers(0, 2**16)),
    )
    window = draw(st.none() | st.integers(1, 400))
    return case.with_options(window=window) if window else case


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_any_lengths(case: Case) -> None:
    verify(case)


def test_more_sequences_than_one_look_at_the_lengths_takes() -> None:
    for count in (126, 127, 128, 300):  # 128 at once, the rows before and behind all sequences among them
        lens = tuple(range(5, 5 + count))
        verify(Case(lens, (3,) * count, heads=(8, 2), dims=(64, 64), dtype=BF16, uncovered=(2, 4)))
    verify(Case((0, 0), (3, 2), heads=(8, 2), dims=(64, 64), dtype=BF16))


def large_call() -> AttentionCall:
    return build(Case((700, 300), (700, 257), heads=(32, 8), dims=(128, 128), dtype=BF16), "cuda")


def attended(query: Tensor, *args: Tensor) -> Tensor:
    out = tcport.paged_attention(query + 0, *args)
    assert isinstance(out, Tensor)
    return out


def arguments(call: AttentionCall) -> list[Tensor]:
    return [getattr(call, name) for name in hopper._POSITIONAL]


def test_compiled_code_calls_it_and_replays_in_a_graph() -> None:
    call = large_call()
    compiled = torch.compile(attended, backend="tcport", fullgraph=True, dynamic=True)
    want, _ = reference.paged_attention(*(a.cpu() for a in arguments(call)))
    torch.testing.assert_close(compiled(*arguments(call)).cpu().float(), want.float(), rtol=0, atol=2e-2)
    report = tcport.last_report()
    assert report is not None
    assert [(n.kernel, n.tier) for n in report.nodes] == [("hopper_prefill", "tuned")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(*arguments(call))
    call.query.copy_(torch.randn_like(call.query))
    want, _ = reference.paged_attention(*(a.cpu() for a in arguments(call)))
    graph.replay()
    torch.testing.assert_close(out.cpu().float(), want.float(), rtol=0, atol=2e-2)


def test_eager_code_calls_it_and_it_stands_aside_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(call: AttentionCall, tile: TileConfig, launch: Any, units: int) -> Any:
        calls.append(call.query.shape[0])
        return hopper_prefill(call, tile, launch, units)

    monkeypatch.setattr(hopper.hopper_prefill, "hopper_prefill", counted)
    large, small = large_call(), build(CASE, "cuda")
    odd = torch.zeros(large.k_cache.numel() + 1, dtype=BF16, device="cuda")[1:].view(large.k_cache.shape)
    odd.copy_(large.k_cache)
    for call in (large, small, dataclasses.replace(large, k_cache=odd)):
        want, _ = reference.paged_attention(*(a.cpu() for a in arguments(call)))
        got = attended(*arguments(call))
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=0, atol=2e-2)
    assert calls == [957]  # 700 + 257 tokens; the small call and the odd address went to the plain kernel


def test_options_reach_the_calls_that_it_hands_on() -> None:
    """In code whose sizes are open: a forced kernel that is not for a call is an error, and strict is no obstacle."""
    small = arguments(build(Case((50, 3), (40, 3), heads=(32, 8), dims=(128, 128), dtype=BF16), "cuda"))
    want, _ = reference.paged_attention(*(a.cpu() for a in small))
    for options in ({"kernel": "hopper_prefill"}, {"strict": True}):
        compiled = torch.compile(attended, backend="tcport", fullgraph=True, dynamic=True, options=options)
        compiled(*arguments(large_call()))
        assert [n.kernel for n in tcport.last_report().nodes] == ["hopper_prefill"]  # type: ignore[union-attr]
        if "strict" in options:
            torch.testing.assert_close(compiled(*small).cpu().float(), want.float(), rtol=0, atol=2e-2)
            continue
        with pytest.raises(NoCandidateError, match="CTAs are under a quarter"):
            compiled(*small)


def test_it_is_trusted_on_this_device() -> None:
    call = large_call()
    profile = device_profile(call.query.device)
    from tcport.lowering.operators import choose_for
    from tcport.probes import trusted

    first = choose_for(PAGED_ATTENTION, opened(attention_spec(call)), profile).selection.candidates[0]
    assert first.kernel == "hopper_prefill"
    assert isinstance(first.config, TileConfig)
    assert trusted("hopper_prefill", profile, first.config) is None
