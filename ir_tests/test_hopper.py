"""The kernel for Hopper without one: what it takes, its tiles, where its copies read, and what it compiles to."""

from __future__ import annotations

import dataclasses
import functools
import types
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import Case, build
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tcport import chain, history, quarantine
from tcport.device import DeviceProfile, catalogue_profile
from tcport.errors import KernelBuildError, NoCandidateError, NoTileError
from tcport.ir import AttentionSpec, KVLayout, TileConfig
from tcport.kernels import reference, triton_prefill
from tcport.kernels.call import AttentionCall
from tcport.kernels.hopper_blocks import block_in_turn
from tcport.kernels.hopper_prefill import Matrix, box_keys, hopper_prefill, misfit
from tcport.kernels.offline import record
from tcport.lowering import hopper
from tcport.lowering.registry import select
from tcport.lowering.spec import attention_spec, opened
from tcport.tiling.footprint import ENTRIES, measure
from tcport.tiling.hopper import rank_hopper_tiles
from tcport.tiling.plan import plain_spec

H200 = catalogue_profile("h200")


def spec(dim: int = 128, page: int = 16, **changes: Any) -> AttentionSpec:
    plain = plain_spec(
        num_q_heads=32, num_kv_heads=8, dim_qk=dim, dim_v=dim, page=page, batch=4, context=4096, tokens=4096,
        dtype="bfloat16", kv_dtype="bfloat16",
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def refusal(spec: AttentionSpec) -> str:
    """Why the kernel does not take a call on an H200; "" when it does."""
    chosen = select("paged_attention", spec, H200)
    return next((r.reason for r in chosen.rejections if r.kernel == "hopper_prefill"), "")


def test_basic_mode_has_no_kernel_for_one_architecture() -> None:
    old = dataclasses.replace(H200, basic_mode="The CUDA driver reports version 11.8.")
    chosen = select("paged_attention", spec(), old)
    assert [r.reason for r in chosen.rejections if r.kernel == "hopper_prefill"] == [
        "hardware-specific, and the device is in basic mode: The CUDA driver reports version 11.8."
    ]
    assert chosen.candidates[0].kernel == "triton_prefill"


def test_it_goes_before_the_plain_kernel_on_hopper_and_is_there_on_no_other_device() -> None:
    kernels = [c.kernel for c in select("paged_attention", spec(), H200).candidates]
    assert kernels[:2] == ["hopper_prefill", "triton_prefill"]
    for device in ("a100", "b200", "rtx4090", "mi300x"):
        assert "hopper_prefill" not in [
            c.kernel for c in select("paged_attention", spec(), catalogue_profile(device)).candidates
        ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"form": "decode"}, "one query token per sequence"),
        ({"query_dtype": "float32", "kv_dtype": "float32"}, "16-bit floats of one dtype, not float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "bfloat16 with a cache of float8_e4m3fn"),
        ({"head_dim_qk": 80, "head_dim_v": 80}, "head dims 64, 128, 256, not 80 and 80"),
        ({"head_dim_v": 64}, "not 128 and 64"),
        ({"num_q_heads": 8 * 129}, "129 query heads"),
        ({"softcap": True, "sinks": True}, "has no softcap, sinks"),
        ({"mask": True}, "has no mask"),
        ({"batch_invariant": True}, "has no batch_invariant"),
        ({"num_splits": 3}, "has no num_splits"),
        ({"k_layout": KVLayout(16, 16 * 1024, 1024, 128, 2)}, "K: TMA copies dims that lie together"),
        ({"k_layout": KVLayout(16, 16 * 64, 64, 1024, 1)}, "K: tokens 64 apart overlap, of 128 dims each"),
        ({"v_layout": KVLayout(16, 16 * 1028, 1028, 128, 1)}, "V: a token stride of 2056 bytes"),
        ({"v_layout": KVLayout(16, 16 * 1024 + 8, 1024, 128, 1)}, "V: a page stride of 16392"),
        ({"v_layout": KVLayout(16, 16 * 1024, 1024, 1000, 1)}, "V: heads 1000 apart"),
        ({"k_layout": KVLayout(1, 1024, 1024, 128, 1)}, "1 keys lie together in pages of 1"),
        ({"k_layout": KVLayout(20, 20 * 1024, 1024, 128, 1)}, "4 keys lie together in pages of 20"),
    ],
)
def test_what_it_does_not_take_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(spec(**changes))


@pytest.mark.parametrize("page", [8, 16, 64, 128, 256, 544, 1056])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_it_takes(dim: int, page: int) -> None:
    assert refusal(spec(dim, page)) == ""
    assert refusal(spec(dim, page, window=True, causal=False, return_lse=True)) == ""
    open_stride = sympy.Symbol("s", integer=True, positive=True)
    assert refusal(opened(spec(dim, page, k_layout=KVLayout(page, page * open_stride, open_stride, dim, 1)))) == ""


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0"])
def test_a_triton_that_it_does_not_know_gets_the_plain_kernel(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "triton_version", lambda: version)
    assert f"Gluon of Triton 3.6 to 3.9, this is {version}" in refusal(spec())


def test_the_widest_tile_that_fits_goes_first() -> None:
    # 128 x 256 x 2 bytes of queries and 4 buffers of 128 x 256 x 2 are 320 KiB; with tiles of 64 keys 192.
    assert [rank_hopper_tiles(spec(dim), H200).configs[0] for dim in (64, 128, 256)] == [
        TileConfig(128, 128, 4, 4), TileConfig(128, 128, 4, 2), TileConfig(128, 64, 4, 2),
    ]  # fmt: skip
    half = dataclasses.replace(H200, shared_per_cta_optin=120 << 10, shared_per_unit=120 << 10)
    assert rank_hopper_tiles(spec(128), half).configs == (TileConfig(128, 64, 4, 2),)
    small = dataclasses.replace(H200, shared_per_cta_optin=48 << 10, shared_per_cta=48 << 10)
    with pytest.raises(NoTileError, match="No tile fits"):
        rank_hopper_tiles(spec(64), small)


@given(
    shared=st.integers(1, 300 << 10),
    threads=st.sampled_from([1, 256, 383, 384, 1024]),
    registers=st.sampled_from([1, 128, 255]),
    dim=st.sampled_from([64, 128, 256]),
)
def test_no_device_gets_a_tile_that_it_has_no_room_for(shared: int, threads: int, registers: int, dim: int) -> None:
    facts = {"shared_per_cta": shared, "max_threads_per_cta": threads, "max_registers_per_thread": registers}
    device = DeviceProfile("nvidia", "cuda", arch="sm_90", shared_per_cta_optin=shared, **facts)  # type: ignore[arg-type]
    try:
        tiles = rank_hopper_tiles(spec(dim), device).configs
    except NoTileError:
        tiles = ()
    # Queries, two buffers of K and of V with 64 keys each, and a result on its way out.
    least = 128 * dim * 2 + 2 * 2 * 64 * dim * 2 + max(128 * dim, 16384) + 768
    per_thread = 16 + 64 / 2 + dim / 2 + 64 / 2
    assert bool(tiles) == (shared >= least and threads >= 384 and registers >= per_thread)
    for tile in tiles:
        assert shared > 128 * dim * 2 + 2 * tile.num_stages * tile.block_n * dim * 2


@pytest.mark.parametrize(("dim", "page"), [(64, 16), (128, 16), (128, 1056), (256, 128)])
def test_shared_memory_of_what_is_compiled(dim: int, page: int, tmp_path: Path) -> None:
    tile = rank_hopper_tiles(spec(dim, page), H200).configs[0]
    compiled = measure(spec(dim, page, window=True, return_lse=True), [tile], H200, ENTRIES["hopper_prefill"], tmp_path)
    assert compiled[0].error is None
    (footprint,) = compiled[0].footprints
    buffers = 128 * dim * 2 + 2 * tile.num_stages * tile.block_n * dim * 2 + max(128 * dim, 16384)
    assert buffers < footprint.shared <= buffers + 768
    assert footprint.threads == 384  # two groups of four warps, and four for the one that fetches
    assert footprint.over_limit(H200) is None


@given(
    page=st.sampled_from([8, 16, 48, 544]),
    heads=st.integers(1, 5),
    dim=st.sampled_from([64, 128]),
    layout=st.sampled_from(["NHD", "HND", "interleaved", "packed", "slice"]),
    place=st.tuples(st.integers(0, 2), st.integers(0, 543), st.integers(0, 4), st.integers(0, 127)),
)
def test_a_copy_reads_where_the_cache_says(
    page: int, heads: int, dim: int, layout: str, place: tuple[int, int, int, int]
) -> None:
    cache = laid_out(layout, 3, page, heads, dim)
    p, token, head, d = (index % size for index, size in zip(place, cache.shape, strict=True))
    matrix = Matrix.of(cache)
    row, column = p * matrix.page_rows + head * matrix.head_rows + token, head * matrix.head_dims + d
    assert row < matrix.rows
    assert column < matrix.columns
    assert cache.as_strided((matrix.rows, matrix.columns), (matrix.stride, 1))[row, column] == cache[p, token, head, d]


def laid_out(layout: str, pages: int, page: int, heads: int, dim: int) -> Tensor:
    """A cache whose elements are their own addresses."""
    shape, order = {
        "NHD": ((pages, page, heads, dim), (0, 1, 2, 3)),
        "HND": ((pages, heads, page, dim), (0, 2, 1, 3)),
        "interleaved": ((pages, 2, page, heads, dim), (0, 2, 3, 4)),
        "packed": ((pages, page, heads, 2 * dim), (0, 1, 2, 3)),
        "slice": ((pages, page, heads + 1, dim), (0, 1, 2, 3)),
    }[layout]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if layout == "interleaved":
        return whole[:, 1]
    return {"packed": whole[..., dim:], "slice": whole[:, :, 1:]}.get(layout, whole.permute(order))


@pytest.mark.parametrize(("page", "block_n", "keys"), [(16, 128, 16), (256, 128, 128), (544, 128, 32), (1056, 64, 32)])
def test_a_box_lies_in_one_page_and_divides_a_tile(page: int, block_n: int, keys: int) -> None:
    assert box_keys(page, block_n) == keys


def call(lens: tuple[int, ...], q_lens: tuple[int, ...], **changes: Any) -> AttentionCall:
    return build(Case(lens, q_lens, heads=(32, 8), dims=(64, 64), dtype=torch.bfloat16, **changes))


@pytest.mark.parametrize(
    ("tokens", "seqs", "why"),
    [
        (600, 1, None),
        (159, 1, "32 CTAs are under a quarter of 132"),  # 4 blocks of 128 rows for each of 8 KV heads
        (160, 1, None),
        (16 * 17, 17, None),  # a block for each sequence, half full
        (15 * 17, 17, "1020 rows of 17 sequences: under 64 each"),
        (4 * 8, 8, "128 rows of 8 sequences"),  # drafts to verify
        (0, 0, "0 rows of 1 sequences"),
    ],
)
def test_calls_of_few_rows_go_to_the_next_kernel(tokens: int, seqs: int, why: str | None) -> None:
    few = hopper.too_few(tokens, seqs, 32, 8, 132)
    assert few is None if why is None else why in str(few)
    # Where a graph's sizes are known, the kernel is not in the chain; where they are open, it is until a call comes.
    known = spec(num_tokens=tokens, num_seqs=seqs)
    assert refusal(known) == (few or "")
    assert refusal(opened(known)) == ""


def test_where_it_is_forced_and_is_not_for_the_device_or_the_call_that_alone_is_said() -> None:
    for device, wanted, reason in (
        ("a100", spec(), "made for architectures sm_90*, the device is sm_80"),
        ("mi300x", spec(), "made for vendor nvidia, the device is amd"),
        ("h200", spec(num_tokens=32, num_seqs=8), "128 rows of 8 sequences: under 64 each, tiles are mostly empty"),
    ):
        with pytest.raises(NoCandidateError) as refused:
            select("paged_attention", wanted, catalogue_profile(device), kernel="hopper_prefill")
        assert refused.value.cause == f"No kernel takes this paged_attention node: hopper_prefill: {reason}."


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "opaque operator"])
def test_what_it_stands_aside_for_goes_down_the_chain_past_what_has_failed(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain kernel has a chain of its own: a tile that was left on this device is not taken by a back door."""
    few = build(Case((70, 3), (40, 3), heads=(8, 2), dims=(64, 64), dtype=torch.bfloat16))
    for module in (hopper, chain):
        monkeypatch.setattr(module, "device_profile", lambda device: H200)
    tried: list[str] = []

    def refused(call: AttentionCall, tile: TileConfig, launch: Any, blocks: int) -> Any:
        tried.append(str(tile))
        raise KernelBuildError("It does not build: injected.", "None.")

    monkeypatch.setattr(triton_prefill, "attend_in_splits", refused)
    steps = len(history.fallbacks())
    operator = torch.ops.tcport.hopper_prefill if compiled else torch.ops.tcport.paged_attention
    want, _ = reference.paged_attention(*(getattr(few, name) for name in hopper._POSITIONAL))
    try:
        for _ in range(2):
            out, _ = operator.default(*(getattr(few, name) for name in hopper._POSITIONAL))
            torch.testing.assert_close(out.float(), want.float(), rtol=0, atol=2e-2)
    finally:
        quarantine.clear()
    failed = [step.kernel.split()[0] for step in history.fallbacks()[steps:]]
    assert set(failed) == {"triton_prefill"}  # each tile once, and the kernel that stood aside not at all
    assert len(failed) == len(tried) == len(set(tried))


@given(blocks=st.integers(1, 200), both_ends=st.booleans())
def test_every_block_is_taken_once_heavy_ones_first(blocks: int, both_ends: bool) -> None:
    """Device code, which is arithmetic on numbers here: from the end, or every third from the beginning."""
    known = {"gl": types.SimpleNamespace(where=lambda which, a, b: a if which else b)}
    in_turn = types.FunctionType(block_in_turn.fn.__code__, known)
    taken = [in_turn(turn, blocks, both_ends) for turn in range(blocks)]
    assert sorted(taken) == list(range(blocks))
    light = taken[2::3] if both_ends else []
    assert light == list(range(len(light)))
    assert [block for block in taken if block not in light] == list(range(blocks - 1, len(light) - 1, -1))


@pytest.mark.parametrize(("units", "ctas"), [(None, 152), (76, 152), (75, 75), (1, 1)])
def test_ctas_are_as_many_as_blocks_or_as_multiprocessors_where_those_have_much_to_do(
    units: int | None, ctas: int
) -> None:
    # 448 tokens of 4 heads each are 14 blocks of 128 rows; three sequences and the rows around them may begin one each.
    asked = call((100, 300, 70), (100, 300, 12))
    asked = dataclasses.replace(asked, query=torch.zeros(448, 32, 64, dtype=torch.bfloat16))
    tile = rank_hopper_tiles(spec(64), H200).configs[0]
    (launch,) = record(functools.partial(hopper_prefill, units=units), asked, tile)
    assert launch.grid == (ctas,)
    assert launch.arguments["items"] == 152
    counter = launch.arguments["counter"]
    assert (counter.shape, counter.dtype) == ((1,), torch.int32)
    if ctas < 152:
        assert counter.item() == 0


def test_addresses_that_tma_does_not_take() -> None:
    right = call((70, 3), (40, 3))
    assert misfit(right) is None
    pages, page, heads, dim = right.k_cache.shape
    odd = torch.zeros(right.k_cache.numel() + 1, dtype=torch.bfloat16)[1:].view(pages, page, heads, dim)
    assert "K begins at an address" in str(misfit(dataclasses.replace(right, k_cache=odd)))
    halves = torch.zeros(pages, page, heads, 2 * dim, dtype=torch.bfloat16)[..., ::2]
    assert "V: TMA copies dims that lie together" in str(misfit(dataclasses.replace(right, v_cache=halves)))
    turned = right.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert "do not lie together" in str(misfit(dataclasses.replace(right, query=turned)))


def test_traced_code_calls_one_opaque_operator() -> None:
    given_call = call((70, 3), (40, 3))
    spec = opened(attention_spec(given_call))
    candidate = select("paged_attention", spec, H200, kernel="hopper_prefill").candidates[0]

    def run(*args: Tensor) -> Tensor:
        return candidate.run(AttentionCall.of(*args), torch.library.wrap_triton)[0]

    args = [getattr(given_call, name) for name in hopper._POSITIONAL]
    graph = make_fx(run, tracing_mode="symbolic")(*args).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [name for name in called if name.startswith("tcport.")] == ["tcport.hopper_prefill.default"]
