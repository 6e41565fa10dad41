"""The kernel entries under ``make_fx`` with symbolic sizes: one graph for every batch, launches as graph nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tcport.ir import BATCH, CONTEXT, TOKENS, CeilDiv, TileConfig
from tcport.kernels.call import AttentionCall, MergeCall, WriteCall
from tcport.kernels.offline import record
from tcport.kernels.triton_decode import paged_decode
from tcport.kernels.triton_merge import merge_states
from tcport.kernels.triton_prefill import paged_prefill
from tcport.kernels.triton_write import kv_write

HEADS, KV_HEADS, DIM, PAGE = 12, 3, 72, 24
STATIC = {HEADS, KV_HEADS, DIM, PAGE}
SPLITS = sympy.Max(1, sympy.Min(16, CeilDiv(132, BATCH)))
BY_ALL_SIZES = sympy.Max(1, sympy.Min(16, CeilDiv(132, BATCH + TOKENS), CeilDiv(CONTEXT, 128)))


def tensors(tokens: int, sequences: int) -> dict[str, torch.Tensor]:
    """Meta tensors of a call: every size of theirs is symbolic in the trace."""
    cache = torch.empty(40, PAGE, KV_HEADS, DIM, device="meta", dtype=torch.bfloat16)
    return {
        "query": torch.empty(tokens, HEADS, DIM, device="meta", dtype=torch.bfloat16),
        "k_cache": cache,
        "v_cache": torch.empty_like(cache),
        "block_table": torch.empty(sequences, 9, device="meta", dtype=torch.int32),
        "seq_lens": torch.empty(sequences, device="meta", dtype=torch.int32),
    }


def launches_and_guards(entry: Callable[..., object], *args: torch.Tensor) -> tuple[int, set[sympy.Expr]]:
    """Kernel launches in the traced graph, and what the trace assumed about sizes."""
    graph = make_fx(entry, tracing_mode="symbolic")(*args)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return sum("triton_kernel_wrapper" in name for name in names), {guard.expr for guard in graph.shape_env.guards}


def test_decode_by_length_takes_any_batch_and_table() -> None:
    def entry(*args: torch.Tensor) -> object:
        call = AttentionCall.of(*args, window=50)
        return paged_decode(call, TileConfig(16, 64, 2, 3, parts=BY_ALL_SIZES), torch.library.wrap_triton)

    count, guards = launches_and_guards(entry, *tensors(5, 5).values())
    assert count == 2
    assert_only_static_sizes_are_assumed(guards)


def test_a_formula_of_open_sizes_is_written_out_twice() -> None:
    """For the scratch memory and for the grid: generated code works it out anew at each place."""

    def entry(*args: torch.Tensor) -> object:
        call = AttentionCall.of(*args)
        return paged_decode(call, TileConfig(16, 64, 2, 3, parts=BY_ALL_SIZES), torch.library.wrap_triton)

    graph = make_fx(entry, tracing_mode="symbolic")(*tensors(5, 5).values()).graph
    places = [
        node.name
        for node in graph.nodes
        if "new_empty" in node.name or "triton_kernel_wrapper" in node.name
        for size in torch.utils._pytree.arg_tree_leaves(*node.args, **node.kwargs)
        if isinstance(size, torch.fx.Node) and isinstance(size.meta["val"], torch.SymInt)
        if any(type(part).__name__ == "Max" for part in sympy.preorder_traversal(size.meta["val"].node.expr))
    ]
    assert [place.split("_mutation")[0] for place in places] == ["new_empty_2", "triton_kernel_wrapper"]


def assert_only_static_sizes_are_assumed(guards: set[sympy.Expr]) -> None:
    for guard in guards:
        assert isinstance(guard, sympy.Eq), guard
        assert int(guard.rhs) in STATIC, guard


@pytest.mark.parametrize(("splits", "launches"), [(1, 1), (4, 2), (SPLITS, 2), (BY_ALL_SIZES, 2)], ids=str)
def test_decode(splits: int | sympy.Expr, launches: int) -> None:
    def entry(*args: torch.Tensor) -> object:
        call = AttentionCall.of(*args, window=50, return_lse=True)
        return paged_decode(call, TileConfig(16, 64, 2, 3, splits), torch.library.wrap_triton)

    count, guards = launches_and_guards(entry, *tensors(5, 5).values())
    assert count == launches
    assert_only_static_sizes_are_assumed(guards)


@pytest.mark.parametrize(
    ("splits", "options", "at_once"),
    [
        (8, {}, 16),
        (9, {}, 64),
        (SPLITS, {}, 64),  # whatever the batch makes of it
        (SPLITS, {"num_splits": 8}, 16),
        (1, {"num_splits": 9}, 64),
        (SPLITS, {"batch_invariant": True}, 64),  # 16 for the smallest sizes
        (sympy.Min(2, CeilDiv(16, BATCH)), {"batch_invariant": True}, 16),
    ],
    ids=str,
)
def test_many_splits_take_a_wide_merge(splits: int | sympy.Expr, options: dict, at_once: int) -> None:
    call = AttentionCall.of(*tensors(5, 5).values(), **options)
    _, merge = record(paged_decode, call, TileConfig(16, 64, 2, 3, splits))
    assert merge.arguments["BLOCK_S"] == at_once
    assert merge.options["num_warps"] == (4 if at_once == 64 else 2)


def test_parts_take_a_narrow_merge_and_wide_rows_fewer_at_once() -> None:
    given = tensors(5, 5)
    tile = TileConfig(16, 64, 2, 3, SPLITS, parts=SPLITS)
    given["block_table"] = given["block_table"].new_empty(5, 99)
    _, merge = record(paged_decode, AttentionCall.of(*given.values()), tile)
    assert (merge.arguments["BLOCK_S"], merge.options["num_warps"]) == (16, 2)
    given["k_cache"] = given["v_cache"] = given["k_cache"].new_empty(40, PAGE, KV_HEADS, 256)
    given["query"] = given["query"].new_empty(5, HEADS, 256)
    _, merge = record(paged_decode, AttentionCall.of(*given.values()), TileConfig(16, 64, 2, 3, 33))
    assert (merge.arguments["BLOCK_S"], merge.options["num_warps"]) == (32, 4)


@pytest.mark.parametrize(("splits", "launches"), [(1, 1), (4, 2), (BY_ALL_SIZES, 1)], ids=str)
def test_varlen(splits: int | sympy.Expr, launches: int) -> None:
    """A number of splits that the trace does not know would cost every prompt its partial results: there are none."""

    def entry(*args: torch.Tensor) -> object:
        call = AttentionCall.of(*args[:6], mask=args[6], softcap=3.0)
        return paged_prefill(call, TileConfig(64, 64, 4, 2, splits), torch.library.wrap_triton)

    starts = torch.empty(6, device="meta", dtype=torch.int32)
    mask = torch.empty(33, 90, device="meta", dtype=torch.bool)
    count, guards = launches_and_guards(entry, *tensors(33, 5).values(), starts, mask)
    assert count == launches
    assert_only_static_sizes_are_assumed(guards)


def test_write() -> None:
    def entry(*args: torch.Tensor) -> object:
        return kv_write(WriteCall.of(*args), torch.library.wrap_triton)

    key = torch.empty(33, KV_HEADS, DIM, device="meta", dtype=torch.bfloat16)
    cache = tensors(1, 1)["k_cache"]
    slots = torch.empty(33, device="meta", dtype=torch.int64)
    count, guards = launches_and_guards(entry, key, torch.empty_like(key), cache, torch.empty_like(cache), slots)
    assert count == 1
    assert_only_static_sizes_are_assumed(guards)


def test_merge() -> None:
    def entry(*args: torch.Tensor) -> object:
        return merge_states(MergeCall.of(*args), torch.library.wrap_triton)

    out = torch.empty(33, HEADS, DIM, device="meta", dtype=torch.bfloat16)
    lse = torch.empty(33, HEADS, device="meta")
    count, guards = launches_and_guards(entry, out, lse, torch.empty_like(out), torch.empty_like(lse))
    assert count == 1
    assert_only_static_sizes_are_assumed(guards)


@pytest.mark.parametrize("same", [True, False])
def test_whether_v_is_a_view_of_k_is_decided_at_open_offsets(same: bool) -> None:
    """A comparison of open sizes gives a SymBool, which hashes and compares as no bool does."""
    answers: list[object] = []

    def entry(pool: torch.Tensor, k_at: torch.Tensor, v_at: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        sizes = [4, PAGE, KV_HEADS, DIM]
        k, v = (pool.as_strided(sizes, pool.stride()[1:], at.shape[0]) for at in (k_at, v_at))
        answers.append(AttentionCall.of(rest[0], k, v, *rest[1:]).v_is_view_of_k)
        return k

    query, _, _, table, lens = tensors(5, 5).values()
    pool = torch.empty(3, 4, PAGE, KV_HEADS, DIM, device="meta", dtype=torch.bfloat16)
    offsets = [torch.empty(n, device="meta") for n in (1000, 1000 if same else 2000)]
    make_fx(entry, tracing_mode="symbolic")(pool, *offsets, query, table, lens)
    assert answers[-1] is same
