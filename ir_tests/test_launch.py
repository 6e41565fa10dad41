"""Direct launches: what the second and every later launch of a kernel passes on, and when Inductor's own is back."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LambdaFuture
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, CompileResult
from torch.autograd import profiler
from torch.utils import _debug_mode
from triton.backends.nvidia.driver import CudaLauncher
from triton.knobs import HookChain

from tcport._inductor.blame import failed_kernel
from tcport._inductor.launch import launching_directly, launching_nothing, with_short_launches
from tcport.failures import cause_of

GRID = {"grid_type": "FixedGrid", "fixed_grid": ["n", "_grid_1", "2"], "kernel_name": "attend"}


class Passing:
    """A launcher that does as those of Triton's backends: it puts its arguments into another order."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch, self.overlapped, self.scratch = launch, True, 0

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        scratch = object() if self.scratch else None
        self.launch(stream, (x, y, z), function, self.overlapped, scratch, *args)


class Fresh(Passing):
    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        self.launch(stream, function, *args, object())


class Computing(Passing):
    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        self.launch(stream, (x + 0, y, z), function, *args)


class Scaling(Passing):
    """Its function is one in C, as Triton's."""

    def __call__(self, x: Any, y: Any, *args: Any) -> None:
        self.launch(y, x)


class Comparing(Passing):
    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        if x == 0:
            return
        self.launch(stream, (x, y, z), function, *args)


class Choosing(Passing):
    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        self.launch(stream, (max(x, y), y, z), function, *args)


class Preferring(Passing):
    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        self.launch(stream, (x or 1, y, z), function, *args)


class Insisting(Passing):
    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        assert isinstance(x, int)
        self.launch(stream, (x, y, z), function, *args)


class Kernel:
    """A kernel as Inductor has it once it is compiled, of the parameters ``q, n`` and the constant 64."""

    def __init__(self, runner: Any, scratch: int = 0, meta: dict[str, Any] | None = None, **more: Any) -> None:
        self.enter, self.leave = HookChain(), HookChain()
        metadata = types.SimpleNamespace(global_scratch_size=scratch, profile_scratch_size=0)
        self.scope = {
            "bin": types.SimpleNamespace(metadata=metadata, launch_metadata=lambda *args: "for the hooks"),
            "runner": runner,
            "function": "function",
            "metadata": "packed",
            "launch_enter_hook": self.enter,
            "launch_exit_hook": self.leave,
        }
        names, arguments = ["q", "n", "_grid_1"], ["q", "n", "64"]
        called = ["grid_0", "grid_1", "grid_2", "stream", "function", "metadata"]
        called += ["bin.launch_metadata((grid_0, grid_1, grid_2), stream, q, n, 64)", "launch_enter_hook"]
        called += ["launch_exit_hook", *arguments]
        result = CompileResult(None, triton.Config({}), {}, GRID)
        generate = with_short_launches(CompileResult._gen_launcher_code)
        self.launcher = generate(result, self.scope, names, called, **more)
        self.launcher.store_cubin = False
        kernel = CachingAutotuner.__new__(CachingAutotuner)
        kernel.launchers, kernel.inductor_meta = [self.launcher], {**GRID, **(meta or {})}
        kernel.dump_launch_params = kernel.dump_launch_tensors = False
        kernel.fn, kernel.triton_meta, kernel.configs = types.SimpleNamespace(__name__="attend"), {}, None
        self.kernel = launching_directly(lambda self: kernel)(None)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.kernel.run(*args, **kwargs)


@pytest.fixture(autouse=True)
def inductor_s(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What goes by Inductor's own path, which needs a device."""
    calls = []

    def run(self: CachingAutotuner, *args: Any, stream: Any, **kwargs: Any) -> None:
        calls.append((*args, stream, kwargs))
        self.launchers[0](*args, stream=stream)

    monkeypatch.setattr(CachingAutotuner, "run", run)
    return calls


@pytest.fixture
def launched() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def kernel(launched: list[tuple[Any, ...]]) -> Kernel:
    return Kernel(Passing(lambda *args: launched.append(args)))


def direct(n: int, stream: int) -> tuple[Any, ...]:
    return stream, (n, 5, 2), "function", True, None, "packed", None, None, None, "q", n, 64


def test_all_but_the_first_launch_are_direct(
    kernel: Kernel, launched: list[tuple[Any, ...]], inductor_s: list[tuple[Any, ...]]
) -> None:
    for n in (3, 4, 7):
        kernel("q", n, 5, stream=n + 10)
    assert inductor_s == [("q", 3, 5, 13, {})]
    hooks = "for the hooks", kernel.enter, kernel.leave
    assert launched == [
        (13, (3, 5, 2), "function", True, None, "packed", *hooks, "q", 3, 64),
        direct(4, 14),
        direct(7, 17),
    ]


@pytest.fixture
def watched(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def start(what: str) -> None:
        if what == "profiler":
            monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
        elif what == "debug mode":
            mode = _debug_mode.DebugMode()
            mode.__enter__()
            modes.append(mode)
        else:
            (kernel.enter if what == "enter hook" else kernel.leave).add(print)

    modes: list[_debug_mode.DebugMode] = []
    yield start
    for mode in modes:
        mode.__exit__(None, None, None)


@pytest.mark.parametrize("what", ["profiler", "debug mode", "enter hook", "exit hook"])
def test_who_watches_launches_sees_them(
    what: str, kernel: Kernel, watched: Callable[[str], None], inductor_s: list[tuple[Any, ...]]
) -> None:
    kernel("q", 3, 5, stream=0)
    kernel("q", 4, 5, stream=0)
    watched(what)
    kernel("q", 5, 5, stream=0)
    assert [call[1] for call in inductor_s] == [3, 5]


def test_what_only_inductor_knows_goes_to_it(kernel: Kernel, inductor_s: list[tuple[Any, ...]]) -> None:
    kernel("q", 3, 5, stream=0)
    kernel("q", 4, 5, stream=0, benchmark_run=True)
    assert inductor_s[1:] == [("q", 4, 5, 0, {"benchmark_run": True})]


def test_a_first_launch_that_fails_is_not_the_first(
    kernel: Kernel, inductor_s: list[tuple[Any, ...]], launched: list[tuple[Any, ...]]
) -> None:
    with pytest.raises(TypeError):
        kernel("q", stream=0)
    kernel("q", 3, 5, stream=0)
    kernel("q", 4, 5, stream=0)
    assert [call[1] for call in inductor_s[1:]] == [3]
    assert launched[1:] == [direct(4, 0)]


def test_a_direct_launch_that_fails_names_its_kernel() -> None:
    refusing: list[str] = []

    def launch(*args: Any) -> None:
        if refusing:
            raise RuntimeError(refusing[0])

    kernel = Kernel(Passing(launch))
    kernel("q", 3, 5, stream=0)
    refusing.append("Triton Error [CUDA]: invalid argument")
    with pytest.raises(RuntimeError, match="invalid argument") as caught:
        kernel("q", 4, 5, stream=0)
    assert failed_kernel(caught.value) == ("attend", "[{}]")


def test_whatever_the_driver_refuses_with_is_a_failed_launch() -> None:
    """As a grid beyond 32 bits, of which Triton's function, in C, says no more than this one."""
    kernel = Kernel(Scaling(math.ldexp))
    kernel("q", 3, 5, stream=0)
    with pytest.raises(OverflowError) as caught:
        kernel("q", 2**31, 5, stream=0)
    assert cause_of(caught.value) == "launch"
    assert failed_kernel(caught.value) == ("attend", "[{}]")


def test_what_a_hook_raises_is_no_failed_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise ValueError("mine")

    for n in (3, 4):
        kernel("q", n, 5, stream=0)
    kernel.enter.add(print)
    monkeypatch.setattr(CachingAutotuner, "run", run)
    with pytest.raises(ValueError, match="mine") as caught:
        kernel("q", 5, 5, stream=0)
    assert cause_of(caught.value) is None


@pytest.mark.parametrize("form", [Comparing, Choosing, Preferring, Insisting])
@pytest.mark.parametrize("n", [0, 4, 7])
def test_a_launcher_that_decides_by_its_arguments_decides_each_time(
    form: type[Passing], n: int, launched: list[tuple[Any, ...]]
) -> None:
    kernel = Kernel(form(lambda *args: launched.append(args)))
    kernel("q", 3, 5, stream=0)
    kernel("q", n, 5, stream=0)
    wanted = {Comparing: n, Choosing: max(n, 5), Preferring: n or 1, Insisting: n}[form]
    assert [args[1] for args in launched[1:]] == ([] if form is Comparing and n == 0 else [(wanted, 5, 2)])


def test_a_launcher_s_names_are_none_of_the_launch_s(launched: list[tuple[Any, ...]]) -> None:
    class Named(Passing):
        kernel: Any
        options: Any
        watched: Any
        none: Any

        def __call__(self, *args: Any) -> None:
            self.launch(self.kernel, self.options, self.watched, self.none, *args)

    runner = Named(lambda *args: launched.append(args))
    own = {"kernel": ["kernel"], "options": ["options"], "watched": ["watched"], "none": ["none"]}
    vars(runner).update(own)
    kernel = Kernel(runner)
    for n in (3, 4):
        kernel("q", n, 5, stream=0)
    assert [list(args[:4]) for args in launched] == [list(own.values())] * 2


@pytest.mark.parametrize("form", [Fresh, Computing])
def test_a_launcher_that_does_more_is_called(form: type[Passing], launched: list[tuple[Any, ...]]) -> None:
    kernel = Kernel(form(lambda *args: launched.append(args)))
    kernel("q", 3, 5, stream=0)
    kernel("q", 4, 5, stream=0)
    first, second = launched
    assert [type(value) for value in first[-3:]] == [type(value) for value in second[-3:]]
    assert second[0] == 0 and "q" in second and 4 in second  # noqa: PT018  (one launch)
    assert kernel.enter in first and kernel.enter not in second  # noqa: PT018


@pytest.mark.parametrize("lines", [[], ["q = q + '!'"]])
def test_a_launcher_with_lines_of_its_own_runs_them(
    lines: list[str], launched: list[tuple[Any, ...]], inductor_s: list[tuple[Any, ...]]
) -> None:
    generate = CompileResult._gen_launcher_code

    def generated(self: Any, scope: dict[str, Any], names: Any, arguments: Any, pre_runner_lines: Any = None) -> Any:
        """As in torch 2.14."""
        given = [f"{name} + '!'" if name == "q" and pre_runner_lines else name for name in arguments]
        return generate(self, scope, names, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompileResult, "_gen_launcher_code", generated)
        kernel = Kernel(Passing(lambda *args: launched.append(args)), pre_runner_lines=lines)
    kernel("q", 3, 5, stream=0)
    kernel("q", 4, 5, stream=0)
    assert [args[-3] for args in launched] == (["q!", "q!"] if lines else ["q", "q"])
    assert len(inductor_s) == (2 if lines else 1)


@pytest.mark.parametrize(
    "leave",
    [
        lambda launch: Kernel(launch, scratch=16),
        lambda launch: Kernel(launch, meta={"coordinate_descent_tuning": True}),
        lambda launch: Kernel(launch, meta={"combo_tuning_groups": [1]}),
    ],
)
def test_kernels_that_need_more_at_each_launch_are_left_alone(
    leave: Callable[[Any], Kernel], launched: list[tuple[Any, ...]], inductor_s: list[tuple[Any, ...]]
) -> None:
    kernel = leave(Passing(lambda *args: launched.append(args)))
    for n in (3, 4):
        kernel("q", n, 5, stream=0)
    assert [call[1] for call in inductor_s] == [3, 4]
    assert "run" not in vars(kernel.kernel)


def test_nothing_is_launched_where_nothing_is_to_be(kernel: Kernel, launched: list[tuple[Any, ...]]) -> None:
    for n in (3, 4):
        kernel("q", n, 5, stream=0)
    with launching_nothing():
        kernel("q", 5, 5, stream=0)
    kernel("q", 6, 5, stream=0)
    assert launched[1:] == [direct(4, 0), direct(6, 0)]


def test_kernels_that_other_processes_compile_are_no_others(kernel: Kernel) -> None:
    made = CachingAutotuner.__new__(CachingAutotuner)
    future = launching_directly(lambda self: LambdaFuture(lambda: made))(None)
    assert future.result() is made
    assert "run" in vars(made)
    assert launching_directly(lambda self: "no kernel")(None) == "no kernel"


def test_triton_s_own_launcher_is_asked_for_the_order_of_its_arguments(launched: list[tuple[Any, ...]]) -> None:
    """The real class of the installed version, without a driver: all that the C function is given is the same."""
    runner = CudaLauncher.__new__(CudaLauncher)
    named = {"num_ctas": 1, "global_scratch_align": 1, "profile_scratch_align": 1, "gsan_enabled": False}
    named |= {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False}
    named |= {"launch_pdl": True, "arg_annotations": ("a", "b"), "kernel_signature": b"signature"}
    vars(runner).update(named, launch=lambda *args: launched.append(args))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace())
        kernel = Kernel(runner)
        kernel("q", 3, 5, stream=7)
    kernel("q", 3, 5, stream=7)  # asks for no driver any more
    hooks = ("for the hooks", kernel.enter, kernel.leave)
    first, second = launched
    assert tuple(None if any(value is hook for hook in hooks) else value for value in first) == second
    assert second[:5] == (3, 5, 2, 7, "function")
    assert second[-1] in (64, ("q", 3, 64))


def test_a_compile_leaves_inductor_as_it_was() -> None:
    before = AsyncCompile.triton, CompileResult._gen_launcher_code
    compiled = torch.compile(lambda x: x.sin(), backend="tcport", options={"force_disable_caches": True})
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin())
    assert (AsyncCompile.triton, CompileResult._gen_launcher_code) == before
