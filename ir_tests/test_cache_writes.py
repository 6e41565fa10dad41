"""Caches are written in place and never copied, whatever their layout, and in whatever order a model uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_writes as models
import pytest
import torch
from cache_writes import LAYOUTS, layer, step, two_tensors, write
from torch import Tensor

import tcport
from tcport.kernels import reference
from tcport.testing import assert_equivalent, assert_graph, assert_no_clone, capture, count_compiles, run_pass
from tcport.testing.graphs import interpreted

OFFSET = "a part of a pool, indexed inside"
SYMBOLIC = ("two halves of one tensor as two inputs", "halves behind an offset", "a pool of layers")


def spy_on_caches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the caches that kernels are given, as they run."""
    from tcport import chain

    seen: list[int] = []
    walk = chain.walk

    def spying(chosen: object, call: object, **options: object) -> object:
        seen.extend(cache.data_ptr() for cache in (call.k_cache, call.v_cache))  # type: ignore[attr-defined]
        return walk(chosen, call, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(chain, "walk", spying)
    return seen


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_written_in_place(name: str, dynamic: bool) -> None:
    model, make = LAYOUTS[name]
    count = 2 if name == "a pool of layers" else 1
    matches = {"merge_kv_write": count, "write_in_place": count}
    if name == OFFSET:
        matches["write_in_place"] = 0  # its views count from the storage's start: left to Inductor
    assert_equivalent(model, *make(), *step().tensors(), dynamic=dynamic, matches=matches)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != OFFSET])
def test_operators_get_the_callers_own_pointers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make = LAYOUTS[name]
    caches, args = make(), step().tensors()
    seen = spy_on_caches(monkeypatch)
    model(*caches, *args)
    eager = set(seen)
    seen.clear()
    interpreted(model)(*caches, *args)
    assert set(seen) == eager


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_code_copies_no_cache(name: str) -> None:
    """Compiled for real, with sizes symbolic where that once went wrong."""
    model, make = LAYOUTS[name]
    ours, theirs, args = make(), make(), step().tensors()
    expected = model(*theirs, *args)
    options = {"force_disable_caches": True}  # two of the layouts are one graph, and a cached one reports no nodes
    compiled = torch.compile(model, backend="tcport", fullgraph=True, dynamic=name in SYMBOLIC, options=options)
    with count_compiles() as compiles:
        actual = compiled(*ours, *args)
    assert compiles == 1
    assert compiles.report.clones == []
    assert {node.op for node in compiles.report.nodes} == {"write_and_attend"}
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_registered_buffer_is_written_in_place() -> None:
    ours, theirs, args = models.Registered(), models.Registered(), step().tensors()
    address = ours.pool.data_ptr()
    report = assert_no_clone(ours, *args)
    theirs(*args)
    assert ours.pool.data_ptr() == address
    assert torch.equal(ours.pool, theirs.pool)
    assert [node.op for node in report.nodes] == ["write_and_attend"]


def attend(kc: Tensor, vc: Tensor, q: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    return tcport.paged_attention(q, kc, vc, table, lens)


def write_twice_then_attend(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    write(kc, vc, k, v, slots)
    write(kc, vc, k * 2, v, slots.flip(0))
    return attend(kc, vc, q, table, lens)


def attend_between_writes(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    write(kc, vc, k, v, slots)
    first = attend(kc, vc, q, table, lens)
    write(kc, vc, k * 2, v, slots)
    return first, attend(kc, vc, q, table, lens)


def attend_before_the_write(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    before = attend(kc, vc, q, table, lens)
    write(kc, vc, k, v, slots)
    return before


def attend_around_the_write(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    before = attend(kc, vc, q, table, lens)
    write(kc, vc, k, v, slots)
    return before + attend(kc, vc, q, table, lens)


def two_attentions_over_one_write(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    write(kc, vc, k, v, slots)
    return attend(kc, vc, q, table, lens) + attend(kc, vc, q * 2, table, lens - 1)


def two_layers_on_one_cache(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    first = layer(kc, vc, q, k, v, table, lens, slots)
    return layer(kc, vc, first, k + 1, v - 1, table, lens, slots)


def snapshot_before(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    old = kc.clone()
    out = layer(kc, vc, q, k, v, table, lens, slots)
    return out, old * 2


def snapshot_after(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    out = layer(kc, vc, q, k, v, table, lens, slots)
    return out, kc.clone()


def snapshot_between(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    write(kc, vc, k, v, slots)
    old = kc + 0
    write(kc, vc, k * 2, v, slots)
    return attend(kc, vc, q, table, lens), old


def attend_over_a_snapshot(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    old = kc.clone()
    write(kc, vc, k, v, slots)
    return attend(old, vc, q, table, lens)


def write_to_a_clone(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    mine = kc.clone()
    write(mine, vc, k, v, slots)
    return attend(mine, vc, q, table, lens), attend(kc, vc, q, table, lens)


def write_a_row_of_the_cache_into_it(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    write(kc, vc, kc[0, :3].clone(), vc[1, :3].clone(), slots)
    return attend(kc, vc, q, table, lens)


def query_from_the_written_cache(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    write(kc, vc, k, v, slots)
    return attend(kc, vc, q + kc[0, :3].repeat(1, 2, 1), table, lens)


def change_the_cache_elsewhere(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    kc[3] = 0
    out = layer(kc, vc, q, k, v, table, lens, slots)
    vc[2].mul_(2)
    return out


def swap_the_caches(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    write(kc, vc, k, v, slots)
    return attend(vc, kc, q, table, lens)


def return_the_cache(kc, vc, q, k, v, table, lens, slots):  # type: ignore[no-untyped-def]
    out = layer(kc, vc, q, k, v, table, lens, slots)
    return out, kc, vc[1]


ORDERS: dict[Callable[..., object], int] = {
    write_twice_then_attend: 1,
    attend_between_writes: 2,
    attend_before_the_write: 0,
    attend_around_the_write: 1,
    two_attentions_over_one_write: 1,
    two_layers_on_one_cache: 2,
    snapshot_before: 1,
    snapshot_after: 1,
    snapshot_between: 1,
    attend_over_a_snapshot: 0,
    write_to_a_clone: 1,
    write_a_row_of_the_cache_into_it: 1,
    query_from_the_written_cache: 0,
    change_the_cache_elsewhere: 1,
    swap_the_caches: 0,
    return_the_cache: 1,
}


@pytest.mark.parametrize("shared", [False, True], ids=["two tensors", "one tensor"])
@pytest.mark.parametrize("model", ORDERS, ids=lambda model: model.__name__)
def test_any_order_of_writes_and_reads_equals_eager(model: Callable[..., object], shared: bool) -> None:
    """With the merges that are possible, and no others; both caches may be one tensor."""
    caches = two_tensors() if not shared else (two_tensors()[0],) * 2
    matches = None if shared else {"merge_kv_write": ORDERS[model]}
    assert_equivalent(model, *caches, *step().tensors(), matches=matches)


@pytest.mark.parametrize("model", [snapshot_before, attend_over_a_snapshot, write_to_a_clone, attend_around_the_write])
def test_snapshots_survive_compilation(model: Callable[..., object]) -> None:
    """Inductor drops a clone when it sees no write to the original (pytorch#198031)."""
    ours, theirs, args = two_tensors(), two_tensors(), step().tensors()
    expected = model(*theirs, *args)
    actual = torch.compile(model, backend="tcport", fullgraph=True)(*ours, *args)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_the_reasons_for_leaving_a_pair_are_given() -> None:
    graph = capture(query_from_the_written_cache, *two_tensors(), *step().tensors())
    report = run_pass("merge_kv_write", graph, matches=0)
    assert "reads the cache between auto_functionalized_v2 and it" in report.notes[0]
    graph = capture(attend_before_the_write, *two_tensors(), *step().tensors())
    assert run_pass("merge_kv_write", graph, matches=0).notes == ()


def test_what_the_graph_becomes() -> None:
    graph = capture(layer, *two_tensors(), *step().tensors(), stage="inplace")
    run_pass("write_in_place", graph, matches=1)
    assert_graph(
        graph,
        r"""
        CHECK-NOT: tcport.kv_write
        CHECK: %[[OP:write_and_attend\w*]] {{.*}} call_function[target=torch.ops.tcport.write_and_attend.default]
        CHECK: operator.getitem](args = (%[[OP]], 0)
        CHECK-NOT: auto_functionalized
        CHECK-NOT: aten.copy_
        """,
    )


def test_symbolic_offsets_of_views_are_kept() -> None:
    """Without a lowering of the storage offset both views are written at offset 0 (pytorch#198068)."""
    ours, args = models.noise(2, *models.CACHE), step().tensors()
    theirs = ours.clone()
    reference.kv_write(args[1] * 2, args[2], theirs[0], theirs[1], args[5])
    torch.compile(models.indexed, backend="tcport", dynamic=True)(ours, *args)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("value_from", ["k_cache", "v_cache"])
@pytest.mark.parametrize("slots", [[1, 2, 3, 4], [4, 3, 2, 1], [3, 0, -1, 1]], ids=str)
@pytest.mark.parametrize("options", [None, {"level": "attention"}, {}], ids=["eager", "attention", "full"])
def test_rows_of_the_cache_itself_move_to_other_slots(
    options: dict[str, Any] | None, slots: list[int], value_from: str
) -> None:
    """Each slot gets what its source held before the call, though later sources are slots written earlier."""

    def move(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        source = {"k_cache": k_cache, "v_cache": v_cache}[value_from]
        tcport.kv_write(k_cache.flatten(0, 1)[:4], source.flatten(0, 1)[:4], k_cache, v_cache, slots)

    caches = {"k_cache": torch.randn(3, 4, 2, 8), "v_cache": torch.randn(3, 4, 2, 8)}
    before = {name: cache.clone().flatten(0, 1) for name, cache in caches.items()}
    expected = {name: rows.clone() for name, rows in before.items()}
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected["k_cache"][slot] = before["k_cache"][row]
            expected["v_cache"][slot] = before[value_from][row]

    torch._dynamo.reset()
    run = move if options is None else torch.compile(move, backend="tcport", fullgraph=True, options=options)
    run(*caches.values(), torch.tensor(slots))
    for name, cache in caches.items():
        assert torch.equal(cache.flatten(0, 1), expected[name])
