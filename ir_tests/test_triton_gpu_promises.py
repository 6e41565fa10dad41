"""What serving relies on, on a GPU: far pages, invariance, no late compilation, graphs, symbolic sizes in Inductor."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from gpu_kernels import BF16, DECODE, DECODE_TILE, TOLERANCE, VARLEN, VARLEN_TILE, attend, tile_of, write
from paged_cases import Case, build, check

from tcport.ir import BATCH, CeilDiv, TileConfig
from tcport.kernels.call import AttentionCall, WriteCall
from tcport.kernels.triton_decode import paged_decode

pytestmark = pytest.mark.gpu


class _InTurn:
    """A launcher of one kernel after the other, as in a graph of Inductor's."""

    traced = True

    def __new__(cls, kernel: Any) -> Any:
        return kernel


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("cut", [{"num_splits": 5}, {"num_splits": 33}, {"parts": 8}], ids=str)
def test_a_merge_that_is_launched_early_waits(cut: dict[str, int], captured: bool) -> None:
    """Calls back to back over the same scratch memory, and among kernels that write what they read."""
    case = dataclasses.replace(DECODE, lens=(700, 33, 2048, 1, 1500, 16, 0, 900), dims=(128, 128), dtype=BF16)
    call, config = build(case, "cuda"), dataclasses.replace(DECODE_TILE, **cut)
    given = [tensor.clone() for tensor in (call.query, call.k_cache, call.v_cache)]

    def steps(launch: Any) -> torch.Tensor:
        for tensor, start in zip((call.query, call.k_cache, call.v_cache), given, strict=True):
            tensor.copy_(start)
        outs = []
        for step in range(30):
            outs += [paged_decode(call, config, launch)[0] for _ in range(2)]
            call.query.add_(outs[-1])
            call.k_cache[step].neg_()
            call.v_cache[step * 3].mul_(0.5)
        return torch.stack(outs)

    want = steps(_InTurn)
    got = steps(lambda kernel: kernel)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = steps(lambda kernel: kernel)
        for _ in range(5):
            graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn], ids=str)
def test_pages_beyond_32_bit_offsets(kv_dtype: torch.dtype) -> None:
    """A request in the last pages of a cache of over 2^31 elements equals the same request in the first pages."""
    pages, page, heads, dim = 16386, 64, 8, 256
    shape = (pages, page, heads, dim * kv_dtype.itemsize)
    k, v = (torch.zeros(shape, dtype=torch.uint8, device="cuda").view(kv_dtype) for _ in "kv")
    key, value = (torch.randn(100, heads, dim, device="cuda", dtype=BF16) for _ in "kv")
    query = torch.randn(1, 32, dim, device="cuda", dtype=BF16)
    results = []
    for first, second in ((pages - 1, pages - 2), (0, 1)):
        position = torch.arange(100, device="cuda")
        slots = torch.tensor([first, second], device="cuda")[position // page] * page + position % page
        write(WriteCall.of(key, value, k, v, slots))
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


def test_results_beyond_32_bit_offsets() -> None:
    """131,074 tokens of 64 heads and 256 dims: more than 2^31 results, and more tokens than a second grid axis has."""
    tokens, heads, dim = 131_074, 64, 256
    assert tokens * heads * dim > 2**31
    query = torch.randn(1, heads, dim, device="cuda", dtype=BF16).expand(tokens, -1, -1)
    k, v = (torch.randn(1, 16, 1, dim, device="cuda", dtype=BF16) for _ in "kv")
    table = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
    lens = torch.ones(tokens, dtype=torch.int32, device="cuda")
    for cu in (None, torch.arange(tokens + 1, dtype=torch.int32, device="cuda")):
        out, _ = attend(AttentionCall.of(query, k, v, table, lens, cu), TileConfig(64, 32, 4, 2))
        assert torch.equal(out.flatten(0, 1).amax(0), v[0, 0, 0])  # one key: its value is every result
        assert torch.equal(out.flatten(0, 1).amin(0), v[0, 0, 0])
        del out


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
    by_length = dataclasses.replace(DECODE, lens=(3000, 37, 0, 1100)), dataclasses.replace(DECODE_TILE, parts=3)
    for case, config in ((DECODE, dataclasses.replace(DECODE_TILE, num_splits=5)), by_length, (VARLEN, VARLEN_TILE)):
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


LONG_DECODE = dataclasses.replace(DECODE, lens=(1500, 0, *DECODE.lens[2:]))


@pytest.mark.parametrize("case", [DECODE, LONG_DECODE, VARLEN], ids=["decode", "by length", "varlen"])
def test_a_captured_graph_follows_lengths_changed_in_place(case: Case) -> None:
    config = dataclasses.replace(tile_of(case), num_splits=2, parts=2)
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
    config = dataclasses.replace(DECODE_TILE, num_splits=1 + CeilDiv(8, BATCH), parts=2 + CeilDiv(8, BATCH))
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
