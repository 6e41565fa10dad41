"""Launches of Triton kernels from generated code, without what is the same at every launch.

Before each launch (in torch 2.13, before the first) Inductor's ``CachingAutotuner.run`` asks whether the kernel is to
be tuned, dumped or benchmarked, and names an allocator of scratch memory; its launcher then packs all arguments for
the hooks of a profiler, of which there are mostly none. After a kernel's first launch, generated code calls a function
that does the rest of it, and goes back to Inductor's own while a profiler, a debug mode or a hook is on.

Kernels that Inductor writes itself have a shorter path of torch's own, and keep it.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, CompileResult, GridExpr
from torch.autograd import profiler
from torch.utils._debug_mode import get_active_debug_mode

KERNEL = "_tcport_kernel"
"""The global of such a function that holds its kernel."""
_SHORT = "tcport_short_launch"
_MODULE = "tcport._inductor.launch.direct"
"""Where such functions say they are from: what a driver refuses has no frame of Triton's (:mod:`tcport.failures`)."""
_CALLED_WITH = ("grid_0", "grid_1", "grid_2", "stream", "function", "metadata")
_HOOKS = ("launch_enter_hook", "launch_exit_hook")
_NOT_PASSED_ON = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What a launcher may raise that does more with its arguments than to pass them on, where they are but texts."""
_prepared_kernels: weakref.WeakSet[CachingAutotuner] = weakref.WeakSet()


def launching_directly(compile_triton: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's Triton compile, for kernels whose second launch and all later ones are direct."""

    def triton(self: AsyncCompile, *args: Any, **kwargs: Any) -> Any:
        made = compile_triton(self, *args, **kwargs)
        if not isinstance(made, CodeCacheFuture):
            return _prepared(made)
        result = made.result
        made.result = lambda: _prepared(result())  # type: ignore[method-assign]
        return made

    return triton


def with_short_launches(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's writing of a launcher, which makes the text of the direct one too."""

    def launcher_code(
        self: CompileResult[Any], scope: dict[str, Any], names: Any, runner_args: Any, *more: Any, **options: Any
    ) -> Any:
        launcher = generate(self, scope, names, runner_args, *more, **options)
        # What is given beside them, from torch 2.14 on, are lines of a launcher that does more.
        plain = not any((*more, *options.values()))
        short = _short_launch(self, scope, names, runner_args) if plain else None
        if short is not None:
            setattr(launcher, _SHORT, short)
        return launcher

    return launcher_code


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Generated code does all but launch its Triton kernels, for the length of a ``with`` block."""
    run = CachingAutotuner.run
    direct = {kernel: vars(kernel).pop("run") for kernel in list(_prepared_kernels) if "run" in vars(kernel)}
    CachingAutotuner.run = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachingAutotuner.run = run  # type: ignore[method-assign]
        for kernel, own in direct.items():
            kernel.run = own


def _prepared(kernel: Any) -> Any:
    if type(kernel) is CachingAutotuner and "run" not in vars(kernel):

        def first(*args: Any, **kwargs: Any) -> Any:
            result = CachingAutotuner.run(kernel, *args, **kwargs)
            direct = _direct_launch(kernel)
            if direct is None:
                vars(kernel).pop("run", None)  # another thread may have been first
            else:
                kernel.run = direct
            return result

        kernel.run = first
        _prepared_kernels.add(kernel)
    return kernel


def _direct_launch(kernel: CachingAutotuner) -> Callable[..., Any] | None:
    """The function; None where Inductor has something to do at every launch."""
    launcher = kernel.launchers[0] if len(kernel.launchers) == 1 else None
    short = getattr(launcher, _SHORT, None)
    meta = kernel.inductor_meta
    tuned = meta.get("coordinate_descent_tuning") or meta.get("combo_tuning_groups")
    dumped = kernel.dump_launch_params or kernel.dump_launch_tensors
    if short is None or tuned or dumped or launcher.store_cubin:  # type: ignore[union-attr]
        return None
    return FunctionType(short.__code__, {**short.__globals__, KERNEL: kernel}, kernel.fn.__name__, None, None)


def _short_launch(
    result: CompileResult[Any], scope: dict[str, Any], names: Sequence[str], runner_args: Sequence[str]
) -> Callable[..., Any] | None:
    """The direct launch, before it is told its kernel; None for a launcher of another form than Triton's."""
    place = len(_CALLED_WITH)
    if tuple(runner_args[:place]) != _CALLED_WITH or tuple(runner_args[place + 1 : place + 3]) != _HOOKS:
        return None
    if not all(hasattr(scope[hook], "calls") for hook in _HOOKS) or _has_scratch(scope["bin"].metadata):
        return None
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    own = {**scope, "__name__": _MODULE, "_tcport_autotuner": CachingAutotuner, "_tcport_watched": _watched}
    given, hooked = ", ".join(names), " or ".join(f"{hook}.calls" for hook in _HOOKS)
    body = [
        f"if _tcport_options or {hooked} or _tcport_watched():",
        f"    return _tcport_autotuner.run({KERNEL}, {given}, stream=stream, **_tcport_options)",
        *grid.prefix,
        *(f"grid_{axis} = {size}" for axis, size in enumerate((grid.x_grid, grid.y_grid, grid.z_grid))),
        _call((*_CALLED_WITH, "None", "None", "None", *runner_args[place + 3 :]), own),
    ]
    exec("\n    ".join((f"def launch({given}, *, stream, **_tcport_options):", *body)), own)
    return own["launch"]


def _call(texts: Sequence[str], names: dict[str, Any]) -> str:
    """The call of ``names["runner"]`` as text, or of the C function that it would call.

    Triton's launcher does little more than to put the arguments in the order of its C function, another one in each
    version: it is asked for it once. What it passes beside them must be its own for good, not made for one launch.
    """
    runner = copy.copy(names["runner"])
    launch = getattr(runner, "launch", None)
    calls: list[tuple[Any, ...]] = []
    if launch is not None:
        runner.launch = lambda *args: calls.append(args)
        with contextlib.suppress(*_NOT_PASSED_ON):
            runner(*map(_Text, texts))
    if len(calls) == 1:
        constants = {"_tcport_none": None, **{f"_tcport_its_{name}": value for name, value in vars(runner).items()}}
        written = [_written(value, constants) for value in calls[0]]
        if None not in written:
            names.update(constants, _tcport_launch=launch)
            return f"_tcport_launch({', '.join(written)})"  # type: ignore[arg-type]
    return f"runner({', '.join(texts)})"


class _Text:
    """An argument as text. Whoever asks for its value is refused: the answer would hold for every launch."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __bool__(self) -> bool:
        raise TypeError(f"{self.text} has no value yet")

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self.text} has no value yet")

    __hash__ = None  # type: ignore[assignment]


def _written(value: Any, constants: Mapping[str, Any]) -> str | None:
    """A value that was passed on, as text; None where it is no argument and no constant."""
    if type(value) is _Text:
        return value.text
    for name, constant in constants.items():
        if value is constant:
            return name
    if type(value) is not tuple:
        return None
    items = [_written(item, constants) for item in value]
    return None if None in items else f"({''.join(f'{item}, ' for item in items)})"


def _has_scratch(metadata: Any) -> bool:
    return any(getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))


def _watched() -> bool:
    return profiler._is_profiler_enabled or get_active_debug_mode() is not None
