"""Eager calls like an earlier one skip checks and choice, and give what they gave: results, errors, refusals."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from remembered_calls import check, counted_choices, nothing_remembered, want  # noqa: F401  (fixtures)
from test_chain import problem
from torch import Tensor

import tcport
from tcport import debug, history, ops, remembered
from tcport.errors import DtypeError, MetadataError, ShapeError, TcportError
from tcport.kernels import reference
from tcport.lowering.registry import touch

pytestmark = pytest.mark.usefixtures("nothing_remembered")


def test_equal_calls_are_chosen_for_once_and_each_reads_its_own_tensors(chosen: list[str]) -> None:
    for seed in range(4):
        check(problem(seed=seed))
    assert chosen == ["paged_attention"]


def as_strided_copy(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


OTHERWISE: dict[str, Callable[[tuple[Tensor, ...]], tuple[tuple[Tensor, ...], dict[str, Any]]]] = {
    "a batch": lambda args: (problem(size=5), {}),
    "a head dim": lambda args: (problem(dim=32), {}),
    "a query's strides": lambda args: ((as_strided_copy(args[0]), *args[1:]), {}),
    "a cache's strides": lambda args: ((args[0], args[1].transpose(1, 2).contiguous().transpose(1, 2), *args[2:]), {}),
    "a dtype": lambda args: ((*args[:3], args[3].long(), args[4]), {}),
    "one cache for both": lambda args: ((args[0], args[1], args[1], *args[3:]), {}),
    "a window": lambda args: (args, {"window": 3}),
    "another window": lambda args: (args, {"window": 5}),
    "a scale": lambda args: (args, {"scale": 0.5}),
    "no scale": lambda args: (args, {"scale": 0.0}),
    "causal": lambda args: (args, {"causal": False}),
    "a softcap": lambda args: (args, {"softcap": 2.0}),
    "sinks": lambda args: (args, {"sinks": torch.ones(4)}),
    "scales of keys": lambda args: (args, {"k_scale": torch.tensor(0.5)}),
    "a mask": lambda args: (args, {"mask": torch.rand(3, 16) > 0.3}),
    "a chunk": lambda args: (args, {"chunk": 4}),
    "splits": lambda args: (args, {"num_splits": 2}),
    "no matter what else is in the batch": lambda args: (args, {"batch_invariant": True}),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_another_call_is_chosen_for_anew_and_then_remembered_too(what: str, chosen: list[str]) -> None:
    plain = problem()
    other, options = OTHERWISE[what](plain)
    for args, given in ((plain, {}), (other, options)) * 2:
        check(args, **given)
    assert chosen == ["paged_attention"] * 2


def test_options_of_one_kind_keep_their_own_values(chosen: list[str]) -> None:
    """What is remembered is a choice: each call's numbers and tensors are its own."""
    args = problem()
    for number in (0.5, 2.0, -1.0):
        check(args, sinks=torch.full((4,), number), k_scale=torch.tensor(number))
    assert chosen == ["paged_attention"]
    check(args, scale=0.0)
    check(args, scale=-0.0)


def test_lse_and_out() -> None:
    for seed in range(3):
        args = problem(seed=seed)
        out, lse = tcport.paged_attention(*args, return_lse=True)
        right, right_lse = reference.paged_attention(*args)
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)
        kept = torch.full_like(right, 7.0)
        assert tcport.paged_attention(*args, out=kept) is kept
        torch.testing.assert_close(kept, right, rtol=1e-5, atol=1e-5)


def test_writes_are_remembered_and_land_in_their_own_caches(chosen: list[str]) -> None:
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        key, value = torch.randn(2, 5, 2, 8, generator=rng)
        caches = [torch.zeros(6, 4, 2, 8) for _ in "kv"]
        slots = torch.randperm(24, generator=rng)[:5]
        before = [cache._version for cache in caches]
        tcport.kv_write(key, value, *caches, slots)
        for cache, rows, version in zip(caches, (key, value), before, strict=True):
            expected = torch.zeros(24, 2, 8)
            expected[slots] = rows
            assert torch.equal(cache.flatten(0, 1), expected)
            assert cache._version == version + 1
    assert chosen == ["kv_write"]


def test_rows_of_the_cache_itself_are_copied_first_in_a_remembered_write() -> None:
    for _ in range(3):
        cache = torch.arange(4.0).view(1, 4, 1, 1).repeat(2, 1, 1, 1)
        rows = cache[0, :3]
        tcport.kv_write(rows, rows, cache, torch.zeros_like(cache), torch.tensor([1, 2, 3]))
        assert cache[0].flatten().tolist() == [0, 0, 1, 2]


REFUSED: dict[str, tuple[Callable[[tuple[Tensor, ...]], Any], type[TcportError]]] = {
    "a length for another batch": (lambda args: tcport.paged_attention(*args[:4], args[4][:2]), ShapeError),
    "a cache of another dtype": (lambda args: tcport.paged_attention(args[0], args[1].half(), *args[2:]), DtypeError),
    "a float table": (lambda args: tcport.paged_attention(*args[:3], args[3].float(), args[4]), DtypeError),
    "a window of 0": (lambda args: tcport.paged_attention(*args, window=0), tcport.errors.ArgumentError),
    "True for a window": (lambda args: tcport.paged_attention(*args, window=True), tcport.errors.ArgumentError),
    "False for a softcap": (lambda args: tcport.paged_attention(*args, softcap=False), tcport.errors.ArgumentError),
    "1 for causal": (lambda args: tcport.paged_attention(*args, causal=1), tcport.errors.ArgumentError),
    "a table in a list": (lambda args: tcport.paged_attention(*args[:3], [[0]], args[4]), tcport.errors.ArgumentError),
    "no number": (lambda args: tcport.paged_attention(*args, scale=float("nan")), tcport.errors.ArgumentError),
    "a sparse query": (lambda args: tcport.paged_attention(args[0].to_sparse(), *args[1:]), ShapeError),
    "an expanded query, sparse": (
        lambda args: tcport.paged_attention(torch.zeros(3, 4, 16).to_sparse(), *args[1:]), ShapeError
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_is_refused_alike_before_and_after_its_neighbours(what: str) -> None:
    call, error = REFUSED[what]
    args = problem()
    said = []
    for _ in range(3):
        with pytest.raises(error) as caught:
            call(args)
        said.append(str(caught.value))
        check(args)
        check(args, window=1)
        check((torch.zeros(1, 1, 1).expand(3, 4, 16), *args[1:]))
    assert len(set(said)) == 1


def test_a_refused_call_is_never_kept() -> None:
    before = remembered.remembered()
    for _ in range(3):
        with pytest.raises(ShapeError):
            tcport.paged_attention(*problem()[:4], torch.ones(2, dtype=torch.int64))
    assert remembered.remembered() == before


def test_values_are_still_looked_at_by_debug_mode() -> None:
    args = problem()
    for _ in range(2):
        check(args)
    lost = args[3].clone()
    lost[0] = 99
    with debug.debug_mode():
        with pytest.raises(MetadataError, match=r"block_table\[0, 0\] is 99"):
            tcport.paged_attention(*args[:3], lost, args[4])
        check(args)
    check(args)


def test_no_more_are_kept_than_there_is_room_for_and_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 5)
    args = problem()
    for window in range(1, 20):
        check(args, window=window)
        assert remembered.remembered() <= 5
    gone = [weakref.ref(tensor) for tensor in args]
    del args
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5


def test_a_call_that_was_pushed_out_is_right_again(monkeypatch: pytest.MonkeyPatch, chosen: list[str]) -> None:
    monkeypatch.setattr(remembered, "MOST", 2)
    for window in (1, 2, 3, 1, 1):
        check(problem(), window=window)
    assert len(chosen) == 4


def test_a_gradient_is_refused_in_a_remembered_call_as_before() -> None:
    query, *rest = problem()
    for _ in range(3):
        leaf = query.clone().requires_grad_()
        out = tcport.paged_attention(leaf, *rest)
        with pytest.raises(tcport.errors.UnsupportedFeatureError, match="inference only"):
            out.sum().backward()
        with torch.inference_mode():
            assert not tcport.paged_attention(leaf, *rest).requires_grad


def test_autocast_fake_tensors_and_modes_pass_by_what_is_remembered() -> None:
    args = problem()
    for _ in range(2):
        check(args)
    halves = (args[0], *(cache.bfloat16() for cache in args[1:3]), *args[3:])
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert tcport.paged_attention(*halves).dtype == torch.bfloat16
    with pytest.raises(DtypeError):
        tcport.paged_attention(*halves)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in args]
        assert type(tcport.paged_attention(*fakes)) is torch._subclasses.FakeTensor
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda *given: tcport.paged_attention(*given))(*args)
    assert torch.ops.tcport.paged_attention.default in [node.target for node in traced.graph.nodes]


def test_threads_that_fill_and_empty_the_table_get_their_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 3)
    wrong: list[object] = []

    def work(seed: int) -> None:
        args = problem(seed=seed)
        for number in range(60):
            options = {"window": 1 + (number + seed) % 5}
            out = tcport.paged_attention(*args, **options)
            if not torch.allclose(out.double(), want(args, **options).double(), rtol=1e-4, atol=1e-5):
                wrong.append((seed, number))
            if number % 17 == 0:
                touch()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert remembered.remembered() <= 3


def test_what_compiled_code_does_is_unchanged_by_what_eager_calls_left(chosen: list[str]) -> None:
    args = problem()
    for _ in range(2):
        check(args)
    compiled = torch.compile(ops.paged_attention, backend="tcport", fullgraph=True)
    torch.testing.assert_close(compiled(*args).double(), want(args).double(), rtol=1e-5, atol=1e-5)
    report = tcport.last_report()
    assert report is not None
    assert [node.op for node in report.nodes] == ["paged_attention"]


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [(1, 1), (256, 200)], ids=["decode", "prompts"])
def test_on_a_gpu_each_remembered_call_reads_its_own_tensors_and_addresses(
    q_lens: tuple[int, int], chosen: list[str]
) -> None:
    """Every other K begins where the Hopper kernel's copies cannot: asked each time, it stands aside for these."""
    steps = history.fallbacks()
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        query = torch.randn(sum(q_lens), 32, 128, generator=rng).bfloat16()
        k, v = (torch.randn(40, 16, 8, 128, generator=rng).bfloat16() for _ in "kv")
        table = torch.randperm(40, generator=rng)[:38].view(2, 19).int()
        starts = [torch.tensor([0, q_lens[0], sum(q_lens)])] if sum(q_lens) > 2 else []
        args = (query, k, v, table, torch.tensor([300, 220]), *starts)
        there = [tensor.cuda() for tensor in args]
        if seed % 2:
            there[1] = torch.cat([k.new_zeros(1), k.flatten()]).cuda()[1:].view(k.shape)
        out = tcport.paged_attention(*there)
        torch.testing.assert_close(out.cpu().double(), want(args).double(), rtol=2e-2, atol=2e-2)
    assert len(chosen) <= 2  # what the first call finds out of the device may be a new state
    assert history.fallbacks() == steps
