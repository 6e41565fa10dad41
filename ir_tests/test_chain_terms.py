"""What a kernel of compiled code hands on when it runs stays under the options of the compile.

The kernel for Hopper does so with calls of few rows, in graphs whose sizes are open. Here the CPU is taken for an H200,
and the kernels that would run on one compute in PyTorch, or fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paged_cases import Case, build
from torch import Tensor

import tcport
from tcport import history, quarantine
from tcport.device import catalogue_profile, override_profile
from tcport.errors import KernelBuildError, NoCandidateError
from tcport.failures import cause_of
from tcport.kernels import decomposition, hopper_prefill, reference, triton_prefill
from tcport.kernels.call import AttentionCall

FEW, MANY = ((50, 3), (40, 3)), ((50, 33), (40, 33))
"""Lengths and query tokens: of the first, tiles would be mostly empty."""


class Kernels:
    """What ran, in order; ``broken`` kernels fail to build instead."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.broken: set[str] = set()

    def instead_of(self, name: str) -> Callable[..., Any]:
        def run(call: AttentionCall, tile: object, *launch: object) -> tuple[Tensor, Tensor]:
            self.ran.append(name)
            if name in self.broken:
                raise KernelBuildError(f"{name} does not build: injected.", "None.")
            return decomposition.paged_attention(call)

        return run


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    fakes = Kernels()
    monkeypatch.setattr(hopper_prefill, "hopper_prefill", fakes.instead_of("hopper_prefill"))
    monkeypatch.setattr(triton_prefill, "attend_in_splits", fakes.instead_of("triton_prefill"))
    quarantine.clear()
    torch.compiler.reset()
    with override_profile(dataclasses.replace(catalogue_profile("h200"), device_type="cpu")):
        yield fakes
    quarantine.clear()


def arguments(lens: tuple[int, ...], q_lens: tuple[int, ...]) -> list[Tensor]:
    call = build(Case(lens, q_lens, heads=(64, 32), dims=(64, 64), dtype=torch.bfloat16))
    return [call.query, call.k_cache, call.v_cache, call.block_table, call.seq_lens, call.cu_seqlens_q]  # type: ignore[list-item]


def attend(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor, cu: Tensor) -> Tensor:
    return tcport.paged_attention(q, kc, vc, table, lens, cu)


def compiled(**options: Any) -> Callable[..., Tensor]:
    """The call with every size open, in code of its own."""
    return torch.compile(attend, backend="tcport", dynamic=True, options={"force_disable_caches": True, **options})


def check(run: Callable[..., Tensor], args: list[Tensor]) -> None:
    want, _ = reference.paged_attention(*args)
    torch.testing.assert_close(run(*args).float(), want.float(), rtol=0, atol=2e-2)


def test_without_options_what_is_handed_on_takes_the_next_kernel(kernels: Kernels) -> None:
    run, steps = compiled(), history.fallbacks()
    check(run, arguments(*MANY))
    assert kernels.ran == ["hopper_prefill"]
    check(run, arguments(*FEW))
    assert kernels.ran == ["hopper_prefill", "triton_prefill"]
    assert history.fallbacks() == steps


@pytest.mark.parametrize("level", ["full", "attention"])
def test_a_forced_kernel_that_is_not_for_a_call_is_an_error_with_its_reason(level: str, kernels: Kernels) -> None:
    run, steps = compiled(kernel="hopper_prefill", level=level), history.fallbacks()
    for _ in range(2):
        check(run, arguments(*MANY))
        with pytest.raises(NoCandidateError) as refused:
            run(*arguments(*FEW))
        assert refused.value.cause == (
            "No kernel takes this paged_attention call: hopper_prefill [tuned] 128x128 w4 st4: 86 rows of 2 "
            "sequences: under 64 each, tiles are mostly empty."
        )
        assert refused.value.remedy == "Drop the option 'kernel' to allow other kernels."
    assert set(kernels.ran) == {"hopper_prefill"}
    assert history.fallbacks() == steps
    assert quarantine.keys() == []


def test_of_several_kernels_asked_for_one_of_them_takes_what_is_handed_on(kernels: Kernels) -> None:
    """As compiled code calls it where the kernel for Hopper has won the race of the two."""
    few = arguments(*FEW)

    def run() -> Tensor:
        return torch.ops.tcport.hopper_prefill(*few, kernels=["hopper_prefill", "triton_prefill"])[0]

    check(lambda *args: run(), few)
    assert kernels.ran == ["triton_prefill"]
    kernels.broken = {"triton_prefill"}
    for _ in range(2):
        with pytest.raises(KernelBuildError, match="No kernel is left for paged_attention.*triton_prefill.*injected"):
            run()
    assert set(kernels.ran) == {"triton_prefill"}  # and not PyTorch
    steps = [step for step in history.fallbacks() if "injected" in step.message]
    assert [step.to.split()[0] for step in steps[-2:]] == ["triton_prefill", "nothing"]  # not what stood aside


def test_strict_takes_what_is_planned_and_nothing_that_fails(kernels: Kernels) -> None:
    run, steps = compiled(strict=True), history.fallbacks()
    for _ in range(2):
        check(run, arguments(*FEW))
        check(run, arguments(*MANY))
    assert kernels.ran == ["triton_prefill", "hopper_prefill"] * 2
    kernels.broken = {"triton_prefill"}
    kernels.ran.clear()
    for tried in (1, 2):
        with pytest.raises(KernelBuildError, match="triton_prefill .* injected.*Drop the option 'strict'"):
            run(*arguments(*FEW))
        assert kernels.ran == ["triton_prefill"] * tried  # one tile, and no other in its place
    check(run, arguments(*MANY))
    assert history.fallbacks() == steps
    assert quarantine.keys() == []


def test_strict_takes_nothing_in_the_place_of_what_failed_before(kernels: Kernels) -> None:
    """In the same process, in code that may step down: the next kernel is a fallback for strict code, too."""
    kernels.broken = {"triton_prefill"}
    check(compiled(level="attention"), arguments(*FEW))
    with pytest.raises(KernelBuildError, match="is not tried again: triton_prefill .* injected.*option 'strict'"):
        compiled(strict=True)(*arguments(*FEW))
    kernels.broken = {"triton_prefill", "hopper_prefill"}
    torch.compiler.reset()
    check(compiled(), arguments(*MANY))
    torch.compiler.reset()
    with pytest.raises(KernelBuildError, match="is not tried again: hopper_prefill .* injected.*option 'strict'"):
        compiled(strict=True)(*arguments(*MANY))


def test_the_last_word_of_a_chain_blames_no_kernel_around_it() -> None:
    error = KernelBuildError("No kernel is left.", "None.")
    assert cause_of(error) == "build"
    error.final = True
    assert cause_of(error) is None


def test_a_remembered_call_loosens_no_terms(kernels: Kernels) -> None:
    """A call without options that went well is remembered, with its kernels; the same call under options is not it."""
    few = arguments(*FEW)
    for _ in range(2):
        check(attend, few)
    assert kernels.ran == ["triton_prefill"] * 2
    handed_on = torch.ops.tcport.hopper_prefill
    with pytest.raises(NoCandidateError, match="hopper_prefill .* under 64 each"):
        handed_on(*few, kernels=["hopper_prefill"])
    kernels.broken = {"triton_prefill"}
    with pytest.raises(KernelBuildError, match="injected.*Drop the option 'strict'"):
        handed_on(*few, strict=True)
    assert kernels.ran == ["triton_prefill"] * 3
    check(attend, few)  # what is remembered steps down, too
    with pytest.raises(KernelBuildError, match="is not tried again: triton_prefill .* injected"):
        handed_on(*few, strict=True)
