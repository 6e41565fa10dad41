"""Remembered calls when what their choice rests on changes: kernels that fail, registrations, profiles, terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_injection import TILES, Faulty, FaultyWrite, installed, installed_write, raising
from remembered_calls import check, counted_choices, nothing_remembered, want  # noqa: F401  (fixtures)
from test_chain import CompilationError, problem

import tcport
from tcport import chain, history, quarantine
from tcport.device import device_profile, override_profile, refresh, set_profile
from tcport.errors import KernelBuildError
from tcport.kernels import decomposition
from tcport.kernels.call import AttentionCall
from tcport.lowering.candidate import Candidate
from tcport.lowering.operators import PAGED_ATTENTION
from tcport.lowering.registry import register_lowering, touch, unregister_lowering

pytestmark = pytest.mark.usefixtures("nothing_remembered")


def test_a_kernel_that_starts_to_fail_steps_down_once() -> None:
    failing: list[BaseException] = []

    def fault(tile: object) -> None:
        if tile == TILES[0] and failing:
            raise failing[0]

    with installed(Faulty(fault)) as kernel:
        check(problem(seed=1))
        check(problem(seed=2))
        steps = len(history.fallbacks())
        failing.append(CompilationError("no longer"))
        for seed in range(4):
            check(problem(seed=seed))
        assert kernel.calls == [TILES[0]] * 3 + [TILES[1]] * 4
    (step,) = history.fallbacks()[steps:]
    assert (step.kernel, step.to) == ("faulty [tuned] 64x64 w4 st3", "faulty [tuned] 32x32 w4 st2")


def test_a_write_that_starts_to_fail_is_repeated_whole() -> None:
    failing: list[bool] = []

    def fault() -> None:
        if failing:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")

    key, value = torch.randn(2, 3, 2, 8)
    with installed_write(FaultyWrite(fault)) as kernel:
        for number in range(4):
            caches = [torch.zeros(2, 4, 2, 8) for _ in "kv"]
            tcport.kv_write(key, value, *caches, torch.arange(3))
            assert torch.equal(caches[0][0, :3], key)
            assert torch.equal(caches[1][0, :3], value)
            if number == 1:
                failing.append(True)
        assert kernel.calls == 3


def test_what_another_kernel_would_meet_too_reaches_the_caller_of_a_remembered_call() -> None:
    errors: list[BaseException] = []

    def fault(tile: object) -> None:
        if errors:
            raise errors.pop()

    with installed(Faulty(fault)) as kernel:
        for _ in range(2):
            check(problem())
        errors.append(torch.OutOfMemoryError("full"))
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            tcport.paged_attention(*problem())
        check(problem())
        assert kernel.calls == [TILES[0]] * 4


def test_a_wrong_result_is_found_in_a_remembered_call() -> None:
    spoilt: list[bool] = []

    def mine(spec: object, profile: object) -> Candidate:
        def run(call: AttentionCall, launch: object) -> Any:
            out, lse = decomposition.paged_attention(call)
            return (out[:1], lse) if spoilt else (out, lse)

        return Candidate("mine", "tuned", run)

    register_lowering("paged_attention", name="mine", priority=9)(mine)
    try:
        check(problem())
        spoilt.append(True)
        check(problem())
    finally:
        unregister_lowering("paged_attention", "mine")
    assert history.fallbacks()[-1].kernel == "mine [tuned]"
    assert "float32[1, 4, 16]" in history.fallbacks()[-1].message


def test_a_failure_of_another_call_counts_and_expires_for_remembered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of another width compiles alike: what failed for it is left here too, for as long as it is kept."""
    busy: list[bool] = []

    def fault(tile: object) -> None:
        if busy and tile == TILES[0]:
            raise RuntimeError("Triton Error [CUDA]: busy")

    wide = (*problem()[:3], torch.cat([problem()[3]] * 2, 1), problem()[4])
    clock = [100.0]
    monkeypatch.setattr(quarantine.time, "monotonic", lambda: clock[0])
    with installed(Faulty(fault)) as kernel:
        check(problem())
        busy.append(True)
        check(wide)
        check(problem())
        check(problem())
        assert kernel.calls == [TILES[0], TILES[0], TILES[1], TILES[1], TILES[1]]
        busy.clear()
        clock[0] += quarantine.RETRY_AFTER + 1
        check(problem())
        check(problem())
        assert kernel.calls[5:] == [TILES[0]] * 2


def test_forced_and_strict_calls_are_their_own() -> None:
    call = PAGED_ATTENTION.call(*problem())
    with installed(Faulty(raising(CompilationError("no"), TILES[:1]))) as kernel:
        other = Candidate("other", "tuned", lambda call, launch: decomposition.paged_attention(call))
        register_lowering("paged_attention", name="other", priority=9)(lambda spec, profile: other)
        try:
            check(problem())
            check(problem())
            assert kernel.calls == []
            with pytest.raises(KernelBuildError, match="Drop the option 'strict'"):
                chain.run(PAGED_ATTENTION, call, kernel="faulty", strict=True)
            chain.run(PAGED_ATTENTION, call, kernel="faulty")
            check(problem())
            assert kernel.calls == [TILES[0], TILES[0], TILES[1]]
        finally:
            unregister_lowering("paged_attention", "other")


def test_what_is_registered_and_unregistered_holds_at_the_next_call() -> None:
    ran: list[str] = []

    def row(name: str) -> Candidate:
        def run(call: AttentionCall, launch: object) -> Any:
            ran.append(name)
            return decomposition.paged_attention(call)

        return Candidate(name, "tuned", run)

    check(problem())
    try:
        for name in ("first", "second"):
            register_lowering("paged_attention", name=name, priority=9 + len(ran))(lambda spec, profile, n=name: row(n))
            check(problem())
            check(problem())
        unregister_lowering("paged_attention", "second")
        check(problem())
        assert ran == ["first", "first", "second", "second", "first"]
    finally:
        unregister_lowering("paged_attention", "first")
        unregister_lowering("paged_attention", "second")
    check(problem())
    assert len(ran) == 5


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a lowering may answer otherwise": lambda monkeypatch: touch(),
    "a device is asked again": lambda monkeypatch: refresh(),
    "a failure is forgotten": lambda monkeypatch: quarantine.clear(),
    "bundles are named": lambda monkeypatch: monkeypatch.setenv("TCPORT_BUNDLE", "/nowhere"),
    "a profile is named": lambda monkeypatch: monkeypatch.setenv("TCPORT_DEVICE_PROFILE", "h200"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_choices_rest_on_is_a_new_choice(
    what: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(problem())
    CHANGES[what](monkeypatch)
    check(problem())
    check(problem())
    assert chosen == ["paged_attention"] * 2


def test_another_profile_is_a_new_choice_each_time_it_comes_and_goes(chosen: list[str]) -> None:
    small = device_profile("cpu").replace(l2_bytes=64 << 10)
    check(problem())
    with override_profile(small):
        check(problem())
        check(problem())
    check(problem())
    assert len(chosen) == 3
    set_profile(small, "cpu")
    try:
        check(problem())
        check(problem())
    finally:
        set_profile(None, "cpu")
    check(problem())
    assert len(chosen) == 5


def test_a_kernel_is_asked_each_time_whether_it_stands_aside() -> None:
    seen: list[int] = []

    def odd(spec: object, profile: object) -> Candidate:
        def run(call: AttentionCall, launch: object) -> Any:
            seen.append(int(call.seq_lens[0]))
            return decomposition.paged_attention(call)

        def aside(call: AttentionCall) -> str | None:
            return None if call.query.storage_offset() else "the query begins its storage"

        return Candidate("odd", "tuned", run, aside=aside)

    query, *rest = problem()
    shifted = torch.cat([torch.zeros(1), query.flatten()])[1:].view(query.shape)
    register_lowering("paged_attention", name="odd", priority=9)(odd)
    try:
        for given in (query, shifted, query, shifted):
            check((given, *rest))
    finally:
        unregister_lowering("paged_attention", "odd")
    assert len(seen) == 2
