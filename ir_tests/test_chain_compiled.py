"""The fallback chain in compiled code: one link of one node at a time, and a launch that fails on a live call."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fault_injection import TILES, Faulty, installed, launching, raising, refuse
from subprocess_results import run_in_subprocess
from torch import Tensor

import tcport
from tcport import history, quarantine
from tcport.errors import KernelBuildError, KernelLaunchError
from tcport.kernels import decomposition, reference
from tcport.lowering import bundled
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import register_lowering, unregister_lowering

PAGE, WIDTH = 4, 4


@pytest.fixture(autouse=True)
def _no_failure_remembered() -> Iterator[None]:
    quarantine.clear()
    yield
    quarantine.clear()
    for name in ("first", "second", "third"):
        refuse(name, None)


def serve(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    last = lens - 1
    page = table.gather(1, (last // PAGE)[:, None].long()).squeeze(1)
    tcport.kv_write(k, v, kc, vc, page * PAGE + last % PAGE)
    return tcport.paged_attention(q, kc, vc, table, lens)


def counting(steps: Tensor, *args: Tensor) -> Tensor:
    steps.add_(1)
    return serve(*args) + steps


def reading(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Looks at the cache before it writes to it: a second run would look at something else."""
    before = tcport.paged_attention(q, kc, vc, table, lens)
    return before + serve(q, k, v, kc, vc, table, lens)


def state(size: int = 2) -> list[Tensor]:
    caches = (torch.randn(size * WIDTH, PAGE, 2, 16) for _ in range(2))
    table = torch.randperm(size * WIDTH).reshape(size, WIDTH).int()
    return [*caches, table, torch.randint(1, PAGE * WIDTH + 1, (size,))]


def new_tokens(size: int = 2) -> list[Tensor]:
    return [torch.randn(size, heads, 16) for heads in (4, 2, 2)]


def expected(args: list[Tensor]) -> Tensor:
    """What ``serve`` returns, from the reference on copies."""
    q, k, v, kc, vc, table, lens = (a.clone() for a in args)
    slots = table.long().gather(1, ((lens - 1) // PAGE)[:, None]).squeeze(1) * PAGE + (lens - 1) % PAGE
    reference.kv_write(k, v, kc, vc, slots)
    return reference.paged_attention(q, kc, vc, table, lens)[0].float()


def two_layers(
    q: Tensor, kc: Tensor, vc: Tensor, wide_q: Tensor, wide_kc: Tensor, wide_vc: Tensor, table: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    narrow = tcport.paged_attention(q, kc, vc, table, lens)
    return narrow, tcport.paged_attention(wide_q, wide_kc, wide_vc, table, lens)


def test_a_build_failure_costs_one_node_one_tile() -> None:
    """Layers of head dims 16 and 32; the first tile cannot be built for 32, of which there are others left."""
    kc, vc, table, lens = state()
    wide = [torch.randn(2, 4, 32), *(torch.randn(*kc.shape[:3], 32) for _ in range(2))]
    args = [new_tokens()[0], kc, vc, *wide, table, lens]
    broken = Faulty(raising(KernelBuildError("ptxas fatal: injected.", "None."), TILES[:1]), "broken_at_32")
    sound = Faulty(lambda tile: None, "sound")
    lower = broken.lower
    broken.lower = lambda spec, profile: lower(spec, profile) if spec.head_dim_qk == 32 else sound.lower(spec, profile)  # type: ignore[method-assign]
    with installed(broken):
        report = tcport.explain(two_layers, *args)
        for out, problem in zip(torch.compile(two_layers, backend="tcport")(*args), (args[:3], args[3:6]), strict=True):
            want, _ = reference.paged_attention(*problem, table, lens)
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert [(n.kernel, n.tile) for n in report.nodes] == [
        ("sound", "64x64 w4 st3"),
        ("broken_at_32", "32x32 w4 st2"),
    ]
    assert [(f.cause, f.to) for f in report.graphs[0].fallbacks] == [("build", "broken_at_32 [tuned] 32x32 w4 st2")]
    assert "build: KernelBuildError: ptxas fatal: injected." in str(report)
    assert broken.calls.count(TILES[0]) == 1  # the second compile did not try it again


def test_the_last_link_is_part_of_what_is_compiled() -> None:
    """Where every kernel fails, attention is code that Inductor generates, and no operator that it calls."""
    with installed(Faulty(raising(KernelBuildError("ptxas fatal.", "None.")))):
        report = tcport.explain(tcport.paged_attention, new_tokens()[0], *state())
    assert [n.kernel for n in report.nodes] == ["torch_attention"]
    code = [line for line in report.graphs[0].source.splitlines() if not line.lstrip().startswith("#")]
    assert any("= async_compile." in line for line in code)
    assert [line for line in code if "torch.ops.tcport" in line] == []


def test_strict_makes_a_step_an_error() -> None:
    options = {"strict": True}
    with (
        installed(Faulty(raising(KernelBuildError("ptxas fatal.", "None.")))),
        pytest.raises(KernelBuildError, match="faulty .* ptxas fatal.*Drop the option 'strict'"),
    ):
        torch.compile(serve, backend="tcport", options=options)(*new_tokens(), *state())


def test_500_steps_while_launches_fail_at_random() -> None:
    """Three kernels break one after the other on live calls; every step is answered as if none had."""
    dice = random.Random(1)
    breaks = dict(zip(dice.sample(range(500), 3), ("first", "second", "third"), strict=True))
    reruns = tcport.counters().get("calls run again", 0)
    held = state()
    compiled = torch.compile(serve, backend="tcport", fullgraph=True)
    with installed(launching("first"), 3), installed(launching("second"), 2), installed(launching("third"), 1):
        for step in range(500):
            if step in breaks:
                refuse(breaks[step], RuntimeError("Triton Error [CUDA]: invalid argument"))
            held[3] = torch.randint(1, PAGE * WIDTH + 1, (2,))
            args = [*new_tokens(), *held]
            want = expected(args)
            torch.testing.assert_close(compiled(*args), want, rtol=1e-5, atol=1e-5)
    assert tcport.counters()["calls run again"] - reruns <= 3
    assert {f.kernel for f in history.fallbacks()[-3:]} == {f"{name} [tuned]" for name in breaks.values()}
    assert {f.cause for f in history.fallbacks()[-3:]} == {"launch"}


@pytest.mark.parametrize(
    ("model", "extra", "said"),
    [(counting, 1, r"input \w+ \[\]"), (reading, 0, r"input \w+ \[8, 4, 2, 16\]")],
)
def test_a_call_that_cannot_be_repeated_fails_and_the_next_one_works(model, extra: int, said: str) -> None:
    compiled = torch.compile(model, backend="tcport", fullgraph=True)
    args = [*[torch.zeros(())] * extra, *new_tokens(), *state()]
    with installed(launching("first")):
        compiled(*args)
        refuse("first", RuntimeError("Triton Error [CUDA]: invalid argument"))
        with pytest.raises(KernelLaunchError, match=f"could not be launched .* may have changed .*{said}"):
            compiled(*args)
        want = expected(args[extra:])
        before = reference.paged_attention(args[extra], *args[extra + 3 :])[0]
        out = compiled(*args)
        torch.testing.assert_close(out, want + (args[0] if extra else before), rtol=1e-5, atol=1e-5)


def test_a_lost_device_ends_compiled_code_too() -> None:
    args = [*new_tokens(), *state()]
    with installed(launching("first")):
        compiled = torch.compile(serve, backend="tcport", fullgraph=True)
        compiled(*args)
        refuse("first", RuntimeError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(KernelLaunchError, match="must be restarted"):
            compiled(*args)


LOGGED = """
import test_chain_compiled as tests, torch, tcport
from fault_injection import TILES, Faulty, installed, raising
from tcport.errors import KernelBuildError
with installed(Faulty(raising(KernelBuildError("ptxas fatal.", "None."), TILES[:1]))):
    for _ in range(2):
        torch.compiler.reset()
        tests.attend_twice(*[*tests.new_tokens()[:1], *tests.state()])
"""


def attend_twice(*args: Tensor) -> None:
    def two(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return tcport.paged_attention(q, kc, vc, table, lens) + tcport.paged_attention(q * 2, kc, vc, table, lens)

    torch.compile(two, backend="tcport", options={"level": "attention"})(*args)


def test_the_chain_and_each_step_are_logged_once() -> None:
    """Two layers, compiled twice, in a process that asks for the topic."""
    root = os.path.dirname(os.path.dirname(__file__))
    paths = os.pathsep.join([root, os.path.dirname(__file__)])
    done = subprocess.run(
        [sys.executable, "-c", LOGGED],
        env={**os.environ, "PYTHONPATH": paths, "TCPORT_LOGS": "chain"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, third = [line for line in done.stderr.splitlines() if line.startswith("[tcport.chain]")]
    links = [f"faulty [{tier}] {tile}" for tier, tile in zip(("tuned", "tuned", "generic"), TILES, strict=True)]
    assert first.startswith("[tcport.chain] paged_attention on ")
    assert first.endswith(f": {', then '.join([*links, 'torch_attention [torch]'])}")
    assert (
        second
        == f"[tcport.chain] paged_attention: {links[0]} -> {links[1]}, build: KernelBuildError: ptxas fatal. None."
    )
    assert third.endswith(f": {', then '.join([*links[1:], 'torch_attention [torch]'])}")


def test_without_a_working_compiler_the_service_runs_and_says_so() -> None:
    empty = os.path.dirname(__file__)  # holds no program
    outcome = run_in_subprocess("toolchain_checks", PATH=empty)
    assert outcome == dict.fromkeys(outcome, "")
    assert set(outcome) == {
        "no C++ compiler",
        "no C compiler for a launcher",
        "no assembler",
        "no cache folder",
        "refused",
    }


def test_compiled_code_calls_a_bundle_as_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Precompiled kernels in a compiled graph: the write is seen as one, and the report names the link."""
    calls: list[str] = []

    def kernel(op: str, name: str, spec: object, profile: object, tile: str) -> Any:
        calls.append(f"{name} {tile}")
        if op == "kv_write":
            return lambda call: reference.kv_write(call.key, call.value, call.k_cache, call.v_cache, call.slot_mapping)
        return lambda call: decomposition.paged_attention(call)

    monkeypatch.setattr(bundled, "_kernel", kernel)
    args = [*new_tokens(), *state()]
    with contextlib.ExitStack() as stack:
        for op, name in (("paged_attention", "bundle_attention"), ("kv_write", "bundle_write")):
            run = bundled._runner(name, dataclasses.replace(TILES[0], num_splits=7), lambda kernel: kernel)
            rows = register_lowering(op, name=f"{name}_here", vendor="cpu", priority=9)
            rows(lambda spec, profile, name=name, run=run: Candidate(f"{name}_here", "tuned", run))
            stack.callback(unregister_lowering, op, f"{name}_here")
        want = expected(args)
        out = torch.compile(serve, backend="tcport", fullgraph=True, options={"force_disable_caches": True})(*args)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    last = tcport.last_report()
    assert last is not None
    assert [n.kernel for n in last.nodes] == ["bundle_write_here+bundle_attention_here"]
    assert last.clones == []
    assert calls == ["bundle_write 64x64 w4 st3", "bundle_attention 64x64 w4 st3"]


def test_of_two_opaque_kernels_the_one_that_failed_is_left() -> None:
    """Two layers, each on an operator that generated code calls: head dim 16 on the first kernel, 32 on the second."""
    kc, vc, table, lens = state()
    wide = [torch.randn(2, 4, 32), *(torch.randn(*kc.shape[:3], 32) for _ in range(2))]
    args = [new_tokens()[0], kc, vc, *wide, table, lens]
    narrow, second = launching("first"), launching("second")
    lower = narrow.lower
    narrow.lower = lambda spec, profile: (lower if spec.head_dim_qk == 16 else second.lower)(spec, profile)  # type: ignore[method-assign]
    with installed(narrow):
        compiled = torch.compile(two_layers, backend="tcport", options={"force_disable_caches": True})
        compiled(*args)
        before = len(history.fallbacks())
        refuse("second", RuntimeError("Triton Error [CUDA]: invalid argument"))
        for out, problem in zip(compiled(*args), (args[:3], args[3:6]), strict=True):
            torch.testing.assert_close(out, reference.paged_attention(*problem, table, lens)[0], rtol=1e-5, atol=1e-5)
    (step,) = history.fallbacks()[before:]
    assert (step.kernel, step.to, step.cause) == ("second [tuned]", "torch_attention [torch]", "launch")


def test_an_operator_of_the_model_s_own_costs_no_kernel() -> None:
    """It fails as a launch does, in a graph with a kernel of tcport's: nothing steps down, and its error is raised."""

    def model(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return torch.ops.tcport_faults.work(serve(q, k, v, kc, vc, table, lens) * 2)

    args = [*new_tokens(), *state()]
    with installed(launching("first")):
        compiled = torch.compile(model, backend="tcport", options={"force_disable_caches": True})
        compiled(*args)
        before = len(history.fallbacks())
        refuse("work", RuntimeError("Triton Error [CUDA]: invalid argument"))
        try:
            with pytest.raises(RuntimeError, match="invalid argument"):
                compiled(*args)
        finally:
            refuse("work", None)
        assert len(history.fallbacks()) == before


def test_a_layer_compiles_what_it_needs_and_nothing_else() -> None:
    """Of the slots one loop, and the C++ kernels called from the graph as they are: no other link is built."""
    probes = tcport.counters().get("probes", 0)
    report = tcport.explain(serve, *new_tokens(), *state())
    code = [line.strip() for line in report.graphs[0].source.splitlines() if not line.strip().startswith("#")]
    assert [n.kernel for n in report.nodes] == ["cpp_write+cpp_attention"]
    assert len([line for line in code if "= async_compile." in line]) == 1
    for name in ("kv_write", "paged_attention"):
        assert "\n".join(code).count(f"torch.ops.tcport_cpu.{name}.default(") == 1
    assert tcport.counters().get("probes", 0) == probes
