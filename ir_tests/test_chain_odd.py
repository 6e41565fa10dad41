"""The chain among the odd: exceptions without words, rows nobody could compare, threads, forks, and what is pickled."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_injection import TILES, Faulty, installed, launching, raising, refuse
from test_chain import CompilationError, check, problem
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings
from torch._inductor.runtime import autotune_cache
from torch.fx.experimental.proxy_tensor import make_fx

import tcport
from tcport import _inductor, errors, history, quarantine
from tcport._inductor import compile as inductor_compile
from tcport.attempt import devices_of
from tcport.errors import LoweringRegistrationError, NoCandidateError
from tcport.ir import TileConfig
from tcport.kernels import reference
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.operators import PAGED_ATTENTION
from tcport.lowering.registry import register_lowering, rows, unregister_lowering


@pytest.fixture(autouse=True)
def _no_failure_remembered() -> Iterator[None]:
    quarantine.clear()
    yield
    quarantine.clear()


class Mute(CompilationError):
    """Its own text raises."""

    def __str__(self) -> str:
        raise OSError("no words")


Mute.__module__ = "triton.compiler.errors"


def test_an_exception_that_cannot_say_what_it_is_costs_its_kernel_alone(caplog: pytest.LogCaptureFixture) -> None:
    with installed(Faulty(raising(Mute(), TILES[:1]))):
        check(problem())
    step = history.fallbacks()[-1]
    assert (step.cause, step.error, step.message) == ("build", "Mute", "(its text cannot be had: OSError)")

    def lower(spec: object, profile: object) -> Candidate:
        raise Mute

    register_lowering("paged_attention", name="mute", priority=9)(lower)
    try:
        check(problem())
    finally:
        unregister_lowering("paged_attention", "mute")
    assert "mute of paged_attention: its lowering failed: Mute: (its text cannot be had: OSError)" in caplog.messages


def test_threads_that_meet_one_failure_take_one_step() -> None:
    """Each of eight threads has begun the call before the first of them fails."""
    together = threading.Barrier(8, timeout=60)

    def fault(tile: TileConfig) -> None:
        if tile == TILES[0]:
            together.wait()
            raise CompilationError("no")

    steps, counted = len(history.fallbacks()), tcport.counters().get("fallback build", 0)
    with installed(Faulty(fault)) as kernel, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: check(problem(seed=seed)), range(8)))
        check(problem(seed=9))
    assert kernel.calls.count(TILES[0]) == 8
    assert [step.kernel for step in history.fallbacks()[steps:]] == ["faulty [tuned] 64x64 w4 st3"]
    assert tcport.counters()["fallback build"] == counted + 1


def test_a_fork_in_the_middle_of_a_step_leaves_the_child_no_lock() -> None:
    """A thread that holds a lock is not in the child, and would hold it there for ever."""
    program = """
import os, threading, time
from tcport import counting, history, quarantine
from tcport.probes import results
for module in (counting, history, quarantine, results):
    held = threading.Event()
    def hold():
        with module._lock:
            held.set()
            time.sleep(0.5)
    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if module._lock.acquire(timeout=20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, module
"""
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_cannot_say_whether_it_stands_aside_is_not_asked_to_run(caplog: pytest.LogCaptureFixture) -> None:
    def lower(spec: object, profile: object) -> Candidate:
        return Candidate("mine", "tuned", lambda call, launch: 1 // 0, aside=lambda call: str(1 // 0))

    register_lowering("paged_attention", name="mine", priority=9)(lower)
    try:
        for _ in range(2):
            check(problem())
        with pytest.raises(NoCandidateError, match="it cannot say whether it stands aside: ZeroDivisionError"):
            tcport.chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*problem()), kernel="mine")
    finally:
        unregister_lowering("paged_attention", "mine")
    assert len([said for said in caplog.messages if said.startswith("mine [tuned]: it cannot say")]) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arch": 90}, "has the arch 90. Give a str."),
        ({"name": b"mine"}, "has the name b'mine'. Give a str."),
        ({"flags": "tma"}, "has the flags 'tma'. Give a tuple of str"),
        ({"flags": (1,)}, "has the flags (1,)."),
        ({"priority": None}, "has the priority None. Give a whole number."),
        ({"priority": "9"}, "has the priority '9'."),
    ],
)
def test_a_row_that_could_not_be_compared_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(LoweringRegistrationError, match=re.escape(said)):
        register_lowering("paged_attention", **given)
    check(problem())


def test_a_row_whose_state_cannot_be_had_is_told_and_costs_nothing_else() -> None:
    def broken() -> str:
        raise OSError("no library")

    register_lowering("paged_attention", name="mine", vendor="cpu", state=broken)(lambda spec, profile: Verdict.no("x"))
    try:
        q, *rest = problem()
        out = torch.compile(tcport.paged_attention, backend="tcport")(q, *rest)
        torch.testing.assert_close(out, reference.paged_attention(q, *rest)[0], rtol=1e-5, atol=1e-5)
        (row,) = [row for row in rows("paged_attention") if row.name == "mine"]
        assert row.state_for({"cpu"}) == "its state cannot be had: OSError: no library"
        assert row.state_for({"nvidia"}) == ""
    finally:
        unregister_lowering("paged_attention", "mine")


def test_a_number_on_the_cpu_asks_for_no_kernel_of_the_cpu() -> None:
    """Where sizes are open Dynamo first traces floats, such as those of default arguments, as such numbers."""
    elsewhere = torch.empty(2, 3, device="meta")
    assert devices_of([8, elsewhere, torch.tensor(0.5), None]) == {elsewhere.device}
    assert devices_of([elsewhere, torch.zeros(1)]) == {elsewhere.device, torch.device("cpu")}


def test_reports_and_errors_travel_between_processes() -> None:
    with installed(Faulty(raising(CompilationError("no"), TILES[:1]))):
        report = tcport.explain(tcport.paged_attention, *problem())
    assert report.graphs[0].fallbacks
    for travelling in (report, tcport.last_report(), history.fallbacks()):
        assert pickle.loads(pickle.dumps(travelling)) == travelling
    assert json.loads(json.dumps(report.to_dict()))["graphs"][0]["fallbacks"][0]["cause"] == "build"
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TcportError)]
    for kind in kinds:
        error = kind("It failed.", "Mend it.")
        error.final = True
        arrived = pickle.loads(pickle.dumps(error))
        assert (type(arrived), str(arrived), arrived.final) == (kind, "It failed. Mend it.", True)


def test_threads_in_compiled_code_whose_kernel_fails_are_all_answered() -> None:
    """Eight threads, each with a batch of its own, in the code of one graph: it is compiled again once."""
    batches = [problem(seed=seed) for seed in range(8)]
    want = [reference.paged_attention(*batch)[0] for batch in batches]
    with installed(launching("first")):
        compiled = torch.compile(tcport.paged_attention, backend="tcport", options={"force_disable_caches": True})
        compiled(*batches[0])
        steps, anew = len(history.fallbacks()), tcport.counters().get("recompiles after a failed launch", 0)
        refuse("first", RuntimeError("Triton Error [CUDA]: invalid argument"))
        try:
            with ThreadPoolExecutor(8) as threads:
                outs = list(threads.map(lambda batch: compiled(*batch), batches * 2))
        finally:
            refuse("first", None)
    for out, expected in zip(outs, want * 2, strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert [step.kernel for step in history.fallbacks()[steps:]] == ["first [tuned]"]
    assert tcport.counters()["recompiles after a failed launch"] == anew + 1


@pytest.mark.parametrize("anew", [False, True])
def test_compiled_code_runs_in_other_threads_while_a_graph_is_traced(anew: bool) -> None:
    """By tcport and by plain Inductor, in a first compile and in one anew; up to torch 2.13 they were refused."""
    batch = problem()
    want = reference.paged_attention(*batch)[0]
    earlier, plain = torch.compile(tcport.paged_attention, backend="tcport"), torch.compile(torch.sin)
    earlier(*batch), plain(want)
    asks = torch.fx._symbolic_trace.is_fx_symbolic_tracing
    code = asks.__code__
    answers: list[list[torch.Tensor]] = []

    def traced(tile: TileConfig) -> None:
        with ThreadPoolExecutor(1) as threads:
            answers.append(threads.submit(lambda: [earlier(*batch), plain(want)]).result())

    kernel, refusing = Faulty(traced, "last"), launching("first")
    usual = kernel.lower
    if anew:
        kernel.lower = lambda *given: [refusing.lower(*given), *usual(*given)]  # type: ignore[method-assign,list-item]
    refuse("first", RuntimeError("Triton Error [CUDA]: invalid argument"))
    try:
        with installed(kernel):
            compiled = torch.compile(tcport.paged_attention, backend="tcport", options={"force_disable_caches": True})
            torch.testing.assert_close(compiled(*batch), want, rtol=1e-5, atol=1e-5)
    finally:
        refuse("first", None)
    assert kernel.calls == [TILES[0]]
    ((attended, sine),) = answers
    torch.testing.assert_close(attended, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sine, want.sin(), rtol=1e-5, atol=1e-5)
    assert asks.__code__ is code


def test_other_threads_trace_over_compiled_code_as_ever_while_a_graph_is_compiled_anew() -> None:
    """It is refused, as by torch alone, while the thread beside it is within a trace of its own."""
    batch = problem()
    plain = torch.compile(torch.sin)
    plain(batch[0])
    nested: list[object] = []

    def trace(tracer: Callable[..., Any]) -> object:
        try:
            return [node.target for node in tracer().graph.nodes if node.op == "call_function"]
        except RuntimeError as error:
            return str(error)

    def traced(tile: TileConfig) -> None:
        with ThreadPoolExecutor(1) as threads:
            nested.append(threads.submit(trace, lambda: torch.fx.symbolic_trace(lambda x: plain(x))).result())
            nested.append(threads.submit(trace, lambda: make_fx(lambda x: plain(x))(torch.ones(3))).result())

    asks = torch.fx._symbolic_trace.is_fx_symbolic_tracing
    code = asks.__code__
    traced(TILES[0])  # by torch alone
    kernel, refusing = Faulty(traced, "last"), launching("first")
    usual = kernel.lower
    kernel.lower = lambda *given: [refusing.lower(*given), *usual(*given)]  # type: ignore[method-assign,list-item]
    refuse("first", RuntimeError("Triton Error [CUDA]: invalid argument"))
    try:
        with installed(kernel):
            compiled = torch.compile(tcport.paged_attention, backend="tcport", options={"force_disable_caches": True})
            compiled(*batch)
    finally:
        refuse("first", None)
    refused = "Detected that you are using FX to symbolically trace a dynamo-optimized function."
    assert [str(answer)[: len(refused)] for answer in nested] == [refused] * 4
    assert asks.__code__ is code


def test_compiles_in_two_threads_leave_inductor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends while the second is within, if it can be, as when a graph is compiled anew beside another."""
    begun, beside, ended = threading.Event(), threading.Event(), threading.Event()

    def compile_fx(*args: object, **given: object) -> None:
        if begun.is_set():
            beside.set()
            ended.wait(20)
        else:
            begun.set()
            beside.wait(1)

    def compile_graph() -> None:
        nothing: dict[str, Any] = {}
        _inductor.compile_graph(
            torch.fx.GraphModule({}, torch.fx.Graph()),
            [],
            patches=nothing,
            pipelines=nothing,
            identity="",
            emitters={PAGED_ATTENTION.overload: lambda node: _inductor.Emission(print, exact_strides=False)},
            audit=lambda audit: None,
        )
        ended.set()

    monkeypatch.setattr(inductor_compile, "compile_fx", compile_fx)
    before = (GraphLowering.codegen, AsyncCompile.triton, vars(autotune_cache)["has_triton"], dict(lowerings))
    threads = [threading.Thread(target=compile_graph) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert beside.is_set()
    assert (GraphLowering.codegen, AsyncCompile.triton, vars(autotune_cache)["has_triton"], dict(lowerings)) == before


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_ends_it_and_leaves_the_chain_as_it_was(interruption: type[BaseException]) -> None:
    """In a lowering, in a kernel and in the compile of one: nothing is blamed, and a program that goes on is served."""
    steps = history.fallbacks()
    q, *rest = problem()
    for place in ("lowering", "kernel", "compile"):
        kernel = Faulty(raising(interruption()))
        if place == "lowering":
            kernel.lower = lambda spec, profile: raising(interruption())(TILES[0])  # type: ignore[method-assign,assignment,return-value]
        attend = (
            torch.compile(tcport.paged_attention, backend="tcport") if place == "compile" else tcport.paged_attention
        )
        with installed(kernel), pytest.raises(interruption):
            attend(q, *rest)
        torch.compiler.reset()
        torch.testing.assert_close(attend(q, *rest), reference.paged_attention(q, *rest)[0], rtol=1e-5, atol=1e-5)
    assert history.fallbacks() == steps
    assert quarantine.keys() == []
