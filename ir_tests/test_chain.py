"""The fallback chain as eager calls walk it: right results, recorded reasons, no retry, and what is never survived."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections.abc import Iterator

import pytest
import sympy
import torch
from fault_injection import TILES, Faulty, installed, raising
from torch import Tensor

import tcport
from tcport import history, logs, quarantine
from tcport.device import DeviceProfile, device_profile, override_profile
from tcport.errors import (
    KernelBuildError,
    KernelLaunchError,
    NoCandidateError,
    OutOfResourcesError,
    SelfTestError,
    ShapeError,
)
from tcport.failures import cause_of
from tcport.ir import BATCH
from tcport.kernels import decomposition, reference
from tcport.kernels.call import AttentionCall
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.operators import PAGED_ATTENTION, choose
from tcport.lowering.registry import register_lowering, unregister_lowering

CPU = device_profile(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_failure_remembered() -> Iterator[None]:
    quarantine.clear()
    yield
    quarantine.clear()


def problem(size: int = 3, dim: int = 16, seed: int = 0) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    table = torch.randperm(4 * size, generator=rng).reshape(size, 4).int()
    lens = torch.randint(1, 17, (size,), generator=rng)
    caches = (torch.randn(4 * size, 4, 2, dim, generator=rng) for _ in range(2))
    return torch.randn(size, 4, dim, generator=rng), *caches, table, lens


def check(args: tuple[Tensor, ...]) -> None:
    want, _ = reference.paged_attention(*args, compute_dtype=torch.float64)
    torch.testing.assert_close(tcport.paged_attention(*args).double(), want.double(), rtol=1e-5, atol=1e-5)


class CompilationError(Exception):
    """A compiler's own error, known by where it comes from."""


CompilationError.__module__ = "triton.compiler.errors"

WORKER = 'An exception occurred in a subprocess:\n\nName=attend\n  File "/site/%s", line 3, in make\n%s: at 3:4'

FAULTS = {
    "a compile error": (CompilationError("at 3:4: unsupported"), "build"),
    "our own word for it": (KernelBuildError("ptxas fatal: injected.", "None."), "build"),
    "what Inductor makes of ptxas": (RuntimeError("No valid triton configs. PTXASError: PTXAS error: x"), "build"),
    "shared memory": (RuntimeError("out of resource: shared memory, Required: 300000."), "resources"),
    "our own word for shared memory": (OutOfResourcesError("Needs 300000 bytes.", "None."), "resources"),
    "a refused launch": (RuntimeError("Triton Error [CUDA]: invalid argument"), "launch"),
    "too many registers": (RuntimeError("CUDA error: too many resources requested for launch"), "resources"),
    "a launch that torch's own launcher is refused": (RuntimeError("CUDA driver error: invalid argument"), "launch"),
    "a compile in Inductor's worker": (RuntimeError(WORKER % ("triton/compiler/code_generator.py", "Failed")), "build"),
    "a worker without gcc": (RuntimeError(WORKER % ("triton/runtime/build.py", "Command failed")), "toolchain"),
    "no assembler": (RuntimeError("Cannot find ptxas"), "toolchain"),
    "no C compiler": (RuntimeError("Failed to find C compiler. Please specify via CC."), "toolchain"),
    "wrong numbers": (SelfTestError("Off by 3.", "None."), "wrong numbers"),
    "a missing package": (ImportError("No module named 'triton'"), "unavailable"),
    "a bug in the kernel's own Python": (ValueError("a bug"), "build"),
    "a bug that ends an iteration": (StopIteration("a bug"), "build"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_fails_is_left_once(name: str) -> None:
    error, cause = FAULTS[name]
    steps = len(history.fallbacks())
    counted = tcport.counters().get(f"fallback {cause}", 0)
    with installed(Faulty(raising(error))) as kernel:
        for seed in range(3):
            check(problem(seed=seed))
        # Without a compiler the other tiles are not asked; any other failure is each tile's own.
        assert kernel.calls == list(TILES[:1] if cause == "toolchain" else TILES)
    reasons = history.fallbacks()[steps:]
    assert [r.cause for r in reasons] == [cause] * len(kernel.calls)
    assert reasons[0].kernel == "faulty [tuned] 64x64 w4 st3"
    assert reasons[-1].to.startswith("torch_attention")
    assert str(error).splitlines()[-1][:40] in reasons[0].message
    assert "Traceback" in reasons[0].details
    assert tcport.counters()[f"fallback {cause}"] == counted + len(reasons)


def test_the_next_tile_of_the_same_kernel_is_next() -> None:
    with installed(Faulty(raising(CompilationError("no"), TILES[:1]))) as kernel:
        check(problem(seed=1))
        check(problem(seed=2))
        assert kernel.calls == [TILES[0], TILES[1], TILES[1]]


def test_another_spec_another_driver_and_a_new_try_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(Faulty(raising(RuntimeError("Triton Error [CUDA]: busy"), TILES[:1]))) as kernel:
        check(problem())
        check(problem(dim=32))
        assert kernel.calls == [TILES[0], TILES[1]] * 2
        kernel.calls.clear()
        newer = device_profile("cpu").replace(driver_version="999")
        with override_profile(newer):
            check(problem())
        assert kernel.calls == [TILES[0], TILES[1]]
        kernel.calls.clear()
        monkeypatch.setattr(quarantine, "RETRY_AFTER", 0.0)
        quarantine.clear()
        check(problem())
        check(problem())
        assert kernel.calls == [TILES[0], TILES[1]] * 2


def test_a_tile_that_failed_is_left_whatever_the_number_of_splits() -> None:
    """What is compiled for two parts of the keys is compiled for four."""
    choice = choose(PAGED_ATTENTION, PAGED_ATTENTION.call(*problem()), device_profile("cpu"))
    numbers = 1, 2, sympy.Max(2, BATCH)
    tiles = [dataclasses.replace(TILES[0], num_splits=number) for number in numbers] + [TILES[1]]
    keys = [set(quarantine.keys_of(choice, Candidate("k", "tuned", print, tile)).values()) for tile in tiles]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_a_new_compiler_is_a_new_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(Faulty(raising(CompilationError("no"), TILES[:1]))) as kernel:
        check(problem())
        monkeypatch.setattr(quarantine, "fingerprint", lambda: "triton 99")
        check(problem())
        assert kernel.calls == [TILES[0], TILES[1]] * 2


@pytest.mark.parametrize("said", ["an illegal memory access was encountered", "misaligned address", "DEVICE_LOST"])
def test_a_lost_device_is_never_survived(said: str) -> None:
    steps = history.fallbacks()
    with installed(Faulty(raising(RuntimeError(f"CUDA error: {said}")))) as kernel:
        with pytest.raises(KernelLaunchError, match="must be restarted"):
            check(problem())
        assert kernel.calls == [TILES[0]]
    assert history.fallbacks() == steps


@pytest.mark.parametrize(
    "error", [ShapeError("Wrong.", "Right it."), torch.OutOfMemoryError("out of memory"), MemoryError()]
)
def test_what_another_kernel_would_meet_too_reaches_the_caller(error: Exception) -> None:
    assert cause_of(error) is None
    with installed(Faulty(raising(error))), pytest.raises(type(error)):
        check(problem())


def test_strict_and_forced() -> None:
    call = PAGED_ATTENTION.call(*problem())
    with installed(Faulty(raising(CompilationError("no"), TILES[:1]))) as kernel:
        with pytest.raises(KernelBuildError, match="Drop the option 'strict'"):
            tcport.chain.run(PAGED_ATTENTION, call, strict=True)
        # A forced kernel may take another tile, and nothing but another tile.
        tcport.chain.run(PAGED_ATTENTION, call, kernel="faulty")
        assert kernel.calls == [TILES[0], TILES[0], TILES[1]]
    quarantine.clear()
    with installed(Faulty(raising(OutOfResourcesError("Needs 300000 bytes.", "")))) as kernel:
        for _ in range(2):
            with pytest.raises(OutOfResourcesError, match="No kernel is left for paged_attention .* Needs 300000"):
                tcport.chain.run(PAGED_ATTENTION, call, kernel="faulty")
        assert kernel.calls == list(TILES)


def test_a_kernel_that_stands_aside_has_not_failed() -> None:
    """It is asked at each call; a forced one that is not for the call is an error with its reason."""
    large = problem(size=5)

    def small_only(spec: object, profile: object) -> Candidate:
        def aside(call: AttentionCall) -> str | None:
            return "more than 3 sequences" if call.query.shape[0] > 3 else None

        return Candidate("small_only", "tuned", lambda call, launch: counted(call), aside=aside)

    seen: list[int] = []

    def counted(call: AttentionCall) -> tuple[Tensor, Tensor]:
        seen.append(call.query.shape[0])
        return decomposition.paged_attention(call)

    steps = history.fallbacks()
    register_lowering("paged_attention", name="small_only", priority=9)(small_only)
    try:
        for args in (problem(), large, problem()):
            check(args)
        assert seen == [3, 3]
        with pytest.raises(NoCandidateError, match="small_only .* more than 3 sequences"):
            tcport.chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*large), kernel="small_only")
    finally:
        unregister_lowering("paged_attention", "small_only")
    assert history.fallbacks() == steps


NONSENSE = {
    "it raises": (lambda spec, profile: 1 // 0, "its lowering failed: ZeroDivisionError"),
    "it raises late": (lambda spec, profile: (1 // 0 for _ in "a"), "its lowering failed: ZeroDivisionError"),
    "it compares an open size": (lambda spec, profile: not sympy.Symbol("s0") < 4, "ask isinstance(size, int)"),
    "nothing": (lambda spec, profile: None, "Lowering mine of paged_attention answered None. Return a Candidate"),
    "words": (lambda spec, profile: "no", "answered 'n'"),
    "an empty list": (lambda spec, profile: [], "it gave no candidate and no reason"),
    "a refusal without a reason": (lambda spec, profile: Verdict(False), "it gives no reason"),
    "a kernel that is none": (lambda spec, profile: Candidate("mine", "tuned", None), "none: its run is None"),  # type: ignore[arg-type]
    "options that are words": (
        lambda spec, profile: Candidate("mine", "tuned", print, options="ab"),  # type: ignore[arg-type]
        "none: its options is 'ab'",
    ),
    "parts that are none": (
        lambda spec, profile: Candidate("mine", "tuned", print, parts=(1,)),  # type: ignore[arg-type]
        "none: its parts is (1,)",
    ),
    "a name that is none": (lambda spec, profile: Candidate(None, "tuned", print), "none: its kernel is None"),  # type: ignore[arg-type]
    "a kernel without a hash": (
        lambda spec, profile: Candidate("mine", "tuned", print, options=(("a", [1]),)),
        "which has no hash: unhashable type: 'list'",
    ),
    "a yes without a kernel": (lambda spec, profile: Verdict(True), "it gives no reason"),
    "an unknown tier": (lambda spec, profile: Candidate("mine", "gold", print), "a Candidate of a tier among tuned"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("answer", NONSENSE)
def test_a_row_whose_lowering_is_broken_costs_its_own_kernel(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    lower, reason = NONSENSE[answer]
    register_lowering("paged_attention", name="mine", priority=9)(lower)  # type: ignore[arg-type]
    try:
        for _ in range(3):
            check(problem())
        (said,) = {
            r.reason
            for args in (problem(), problem(5))
            for r in choose(PAGED_ATTENTION, PAGED_ATTENTION.call(*args), CPU).selection.rejections
            if r.kernel == "mine"
        }
        assert reason in said
        with pytest.raises(NoCandidateError, match=re.escape(reason)):
            tcport.chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*problem()), kernel="mine")
    finally:
        unregister_lowering("paged_attention", "mine")
    assert len([r for r in caplog.records if "mine of paged_attention" in r.message]) <= 1


WRONG_RESULTS = {
    "other sizes": (lambda out, lse: (out[:1], lse), "float32[1, 4, 16] and float32[0]"),
    "another dtype": (lambda out, lse: (out.double(), lse), "float64[3, 4, 16] and float32[0]"),
    "one result": (lambda out, lse: out, "returned float32[3, 4, 16], where"),
    "nothing": (lambda out, lse: None, "returned no tensors"),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("what", WRONG_RESULTS)
def test_a_kernel_whose_results_are_not_the_operator_s_is_left(what: str, compiled: bool) -> None:
    spoil, said = WRONG_RESULTS[what]

    def mine(spec: object, profile: object) -> Candidate:
        return Candidate("mine", "tuned", lambda call, launch: spoil(*decomposition.paged_attention(call)))

    torch.compiler.reset()
    attend = torch.compile(tcport.paged_attention, backend="tcport") if compiled else tcport.paged_attention
    want, _ = reference.paged_attention(*problem())
    register_lowering("paged_attention", name="mine", priority=9)(mine)
    try:
        for _ in range(2):
            torch.testing.assert_close(attend(*problem()), want, rtol=1e-5, atol=1e-5)
    finally:
        unregister_lowering("paged_attention", "mine")
    step = history.fallbacks()[-1]
    assert (step.kernel, step.cause) == ("mine [tuned]", "build")
    assert said in step.message


def test_500_steps_with_failures_at_random() -> None:
    """Failures come and go: the quarantine is emptied now and then, as its expiry does."""
    dice = random.Random(0)
    errors = [error for error, _ in FAULTS.values()]

    def fault(tile: object) -> None:
        if dice.random() < 0.3:
            raise dice.choice(errors)

    args = problem()
    want, _ = reference.paged_attention(*args)
    before = len(history.fallbacks())
    with installed(Faulty(fault)):
        for _ in range(500):
            torch.testing.assert_close(tcport.paged_attention(*args), want, rtol=1e-5, atol=1e-5)
            if dice.random() < 0.2:
                quarantine.clear()
    assert len(history.fallbacks()) - before > 50


def test_each_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tcport.chain"), installed(Faulty(raising(CompilationError("no")))):
        for seed in range(3):
            check(problem(seed=seed))
    assert [r.getMessage().partition(",")[0] for r in caplog.records] == [
        "paged_attention: faulty [tuned] 64x64 w4 st3 -> faulty [tuned] 32x32 w4 st2",
        "paged_attention: faulty [tuned] 32x32 w4 st2 -> faulty [generic] 16x16 w1 st1",
        "paged_attention: faulty [generic] 16x16 w1 st1 -> torch_attention [torch]",
    ]


def test_the_environment_turns_a_topic_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TCPORT_LOGS", "passes, chain-test")
    log = logs.logger("chain-test")
    log.info("a choice")
    logs.logger("silent-test").info("never seen")
    assert capsys.readouterr().err == "[tcport.chain-test] a choice\n"


def test_profiles_that_differ_by_the_card_alone_share_a_quarantine() -> None:
    card = DeviceProfile("nvidia", "cuda", arch="sm_90", name="H200", uuid="GPU-1")
    assert card.digest() == card.replace(uuid="GPU-2").digest()
    assert card.digest() != card.replace(driver_version="580").digest()
