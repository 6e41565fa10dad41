"""The C++ kernels of the CPU against the fp64 reference, on every instruction set this processor has."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

import tcport
from tcport import quarantine
from tcport.device import device_profile
from tcport.kernels import cpu_library, reference
from tcport.lowering.operators import KV_WRITE, PAGED_ATTENTION
from tcport.lowering.registry import select
from tcport.testing import PagedBatch, Recipe, build_batch, paged_batches

CPU_FLAGS = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
NEEDS = {
    "avx512_amx": {"avx512vl", "avx512_bf16", "amx_bf16", "amx_tile"},
    "avx512_bf16": {"avx512vl", "avx512_bf16"},
    "avx512": {"avx512vl"},
    "avx2": {"avx2", "fma"},
    "baseline": set(),
}
ISAS = [isa for isa, flags in NEEDS.items() if flags <= CPU_FLAGS]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library = cpu_library.load()
    assert library.select(request.param)
    assert library.isa == request.param
    yield request.param
    assert library.select("")


def attend(batch: PagedBatch, **changes: Any) -> tuple[Tensor, Tensor]:
    """The C++ kernel as eager calls reach it, with its LSE."""
    call = PAGED_ATTENTION.call(**{**batch.arguments, "return_lse": True, **changes})
    return run("paged_attention", "cpp_attention", PAGED_ATTENTION.spec(call), call)


def run(op: str, kernel: str, spec: Any, call: Any) -> Any:
    (candidate,) = select(op, spec, device_profile("cpu"), kernel=kernel).candidates
    return candidate.run(call, lambda kernel: kernel)


def check(recipe: Recipe, **changes: Any) -> None:
    batch = build_batch(recipe)
    batch.check(*attend(batch, **changes))


def test_the_best_instruction_set_is_used() -> None:
    assert cpu_library.load().isa == ISAS[0]
    assert not cpu_library.load().select("mmx")


@hypothesis.settings(max_examples=100)
@hypothesis.given(batch=paged_batches(quantised_dtypes=QUANTISED))
def test_any_small_batch(batch: PagedBatch) -> None:
    batch.check(*attend(batch))


@hypothesis.settings(max_examples=50)
@hypothesis.given(batch=paged_batches(forms=("varlen",), max_length=300, max_query=120, quantised_dtypes=QUANTISED))
def test_any_prompt(batch: PagedBatch) -> None:
    batch.check(*attend(batch))


MANY_QUERIES = Recipe(lens=(700, 40, 1300), q_lens=(90, 40, 33), heads=(6, 2))
FEW_QUERIES = Recipe(lens=(1500, 3, 0, 513, 512), heads=(8, 2), dims=(64, 96))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("recipe", [FEW_QUERIES, MANY_QUERIES], ids=["few", "many"])
@pytest.mark.parametrize("layout", ["page_major", "head_major"])
def test_every_instruction_set(isa: str, dtype: torch.dtype, recipe: Recipe, layout: Any) -> None:
    check(dataclasses.replace(recipe, query_dtype=dtype, layout=layout))


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("scales", ["one", "head", "token"])
def test_every_quantised_cache(isa: str, kv_dtype: torch.dtype, scales: Any) -> None:
    recipe = Recipe(lens=(70, 33), q_lens=(1, 20), kv_dtype=kv_dtype, kv_scales=scales, query_dtype=torch.bfloat16)
    check(recipe)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 100},
        {"chunk": 300},
        {"softcap": 2.0},
        {"alibi": True},
        {"sinks": True},
        {"mask_columns": 800},
        {"causal": False},
        {"window": 600, "sinks": True, "alibi": True, "softcap": 5.0, "mask_columns": 1300, "chunk": 400},
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", [FEW_QUERIES, MANY_QUERIES], ids=["few", "many"])
def test_every_option_over_several_pieces(isa: str, recipe: Recipe, options: dict[str, Any]) -> None:
    check(dataclasses.replace(recipe, **options))


@pytest.mark.parametrize("dims", [(33, 17), (40, 72), (120, 8), (192, 128), (576, 512)], ids=str)
@pytest.mark.parametrize("q_lens", [None, (30, 17)], ids=["decode", "prompt"])
def test_head_dims_that_vectors_do_not_divide(isa: str, dims: tuple[int, int], q_lens: Any) -> None:
    recipe = Recipe(lens=(45, 17), q_lens=q_lens, dims=dims, behind=3, query_dtype=torch.bfloat16)
    check(recipe)


@pytest.mark.parametrize("ratio", [3, 5, 7, 71])
def test_head_ratios(isa: str, ratio: int) -> None:
    check(Recipe(lens=(60, 17), q_lens=(1, 4), heads=(2 * ratio, 2)))


def test_elements_that_are_not_adjacent(isa: str) -> None:
    batch = build_batch(Recipe(lens=(40, 21), q_lens=(11, 1)))
    spread = {
        name: torch.empty(*cache.shape[:2], cache.shape[3], cache.shape[2]).transpose(2, 3).copy_(cache)
        for name, cache in batch.arguments.items()
        if name in ("k_cache", "v_cache")
    }
    assert spread["k_cache"].stride(-1) == 2
    batch.check(*attend(batch, **spread))


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_forced_splits(splits: int) -> None:
    check(dataclasses.replace(FEW_QUERIES, num_splits=splits))
    check(dataclasses.replace(MANY_QUERIES, num_splits=splits))


@pytest.mark.parametrize("recipe", [FEW_QUERIES, MANY_QUERIES], ids=["few", "many"])
@pytest.mark.parametrize("layout", ["page_major", "head_major"])
def test_neither_batch_nor_threads_change_a_bit(recipe: Recipe, layout: Any) -> None:
    batch = build_batch(dataclasses.replace(recipe, layout=layout))
    together, _ = attend(batch)
    bounds = recipe.query_bounds
    for sequence in range(len(recipe.lens)):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        alone, _ = attend(
            batch,
            query=batch.arguments["query"][rows],
            block_table=batch.arguments["block_table"][sequence : sequence + 1],
            seq_lens=batch.arguments["seq_lens"][sequence : sequence + 1],
            cu_seqlens_q=None if recipe.q_lens is None else torch.tensor([0, recipe.q_lens[sequence]]),
        )
        assert torch.equal(alone, together[rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(attend(batch)[0], together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.tensor([[5]])}, r"block_table\[0, 0\] is 5, and the cache has pages 0 to 3"),
        ({"block_table": torch.tensor([[-1]])}, r"block_table\[0, 0\] is -1"),
        ({"seq_lens": torch.tensor([17])}, r"seq_lens\[0\] is 17, and block_table has room for 16 keys"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, "gives sequence 0 the tokens from 0 to 3, and query has 1"),
    ],
)
def test_indices_that_lead_outside_are_refused(changes: dict[str, Tensor], message: str) -> None:
    k_cache, v_cache = torch.randn(2, 4, 16, 1, 16)
    arguments = {"block_table": torch.tensor([[2]]), "seq_lens": torch.tensor([9]), **changes}
    query = torch.randn(1, 2, 16)
    call = PAGED_ATTENTION.call(query, k_cache, v_cache, **arguments)
    with pytest.raises(RuntimeError, match=message):
        run("paged_attention", "cpp_attention", PAGED_ATTENTION.spec(call), call)
    failed = quarantine.keys()
    for attend in (tcport.paged_attention, torch.compile(tcport.paged_attention, backend="tcport")):
        with pytest.raises(RuntimeError, match=message):
            attend(query, k_cache, v_cache, **arguments)
    assert quarantine.keys() == failed  # the call is wrong: it costs no later one its kernel


def test_pages_that_a_mask_hides_may_be_padding() -> None:
    k_cache, v_cache = torch.randn(2, 4, 4, 1, 16)
    query, lens = torch.randn(1, 2, 16), torch.tensor([9])
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[:, 4:8] = False
    results = []
    for hidden in (1, -1, 2**40):
        call = PAGED_ATTENTION.call(query, k_cache, v_cache, torch.tensor([[2, hidden, 3]]), lens, mask=mask)
        results.append(run("paged_attention", "cpp_attention", PAGED_ATTENTION.spec(call), call)[0])
    expected, _ = reference.paged_attention(query, k_cache, v_cache, torch.tensor([[2, 1, 3]]), lens, mask=mask)
    for result in results:
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("kv_dtype", [*FLOATS, *QUANTISED])
@pytest.mark.parametrize("source_dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("layout", ["page_major", "head_major", "spread"])
def test_writes_are_the_reference_to_the_byte(
    isa: str, kv_dtype: torch.dtype, source_dtype: torch.dtype, layout: str
) -> None:
    pages, page, heads, dims = 5, 4, 3, (40, 19)
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(7, heads, 64, generator=random) * torch.logspace(-9, 6, 7)[:, None, None]
    key, value = rows[..., :40].to(source_dtype), rows[..., 45:].to(source_dtype)
    slots = torch.tensor([3, -1, 19, 20, 0, -7, 8], dtype=torch.int32)
    scale = 0.5 + torch.rand(pages, page, heads, generator=random) if kv_dtype in QUANTISED else None

    def empty(dim: int) -> Tensor:
        shape = {"page_major": (1, 2, 3), "head_major": (2, 1, 3), "spread": (1, 3, 2)}[layout]
        sizes = [pages, *((pages, page, heads, dim)[i] for i in shape)]
        cache = torch.full(sizes, 11.0).to(kv_dtype)
        return (
            cache.transpose(1, 2)
            if layout == "head_major"
            else cache.permute(0, 1, 3, 2)[:]
            if shape[1] == 3
            else cache
        )

    written, expected = ([empty(dim) for dim in dims] for _ in range(2))
    call = KV_WRITE.call(key, value, *written, slots, k_scale=scale, v_scale=scale)
    run("kv_write", "cpp_write", KV_WRITE.spec(call), call)
    reference.kv_write(key, value, *expected, slots, k_scale=scale, v_scale=scale)
    for got, wanted in zip(written, expected, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_a_large_write_is_the_reference_to_the_byte(isa: str) -> None:
    """Large enough to be stored past the processor's caches; slots in no order, one tensor misaligned."""
    tokens, heads, dim = 40_000, 2, 128
    key, value = torch.randn(2, tokens, heads, dim)
    slots = torch.randperm(tokens + 100)[:tokens]
    size = (tokens + 112) * heads * dim
    k_cache, v_cache = (torch.zeros(size + 1)[start:][:size].view(-1, 16, heads, dim) for start in (1, 0))
    call = KV_WRITE.call(key, value, k_cache, v_cache, slots)
    run("kv_write", "cpp_write", KV_WRITE.spec(call), call)
    for cache, rows in ((k_cache, key), (v_cache, value)):
        expected = torch.zeros_like(cache).flatten(0, 1)
        expected[slots] = rows
        assert torch.equal(cache.flatten(0, 1), expected)


def test_tile_kernels_with_emulated_tiles() -> None:
    """On a processor that lacks even the rest of their instruction set, the baseline's kernels have their turn."""
    target = "amx" if NEEDS["avx512_bf16"] <= CPU_FLAGS else "baseline"
    script = Path(__file__).parents[1] / ".ci" / "emulate.py"
    done = subprocess.run([sys.executable, str(script), target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 of 288 cases wrong" in done.stdout
