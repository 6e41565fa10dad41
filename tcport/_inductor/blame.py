"""What an exception out of Inductor, or out of code that it generated, says about where it was raised."""

from __future__ import annotations

import contextlib
import functools
import linecache
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode

from tcport._inductor.launch import KERNEL
from tcport.errors import causes

_KERNEL = "tcport_kernel"
_GENERATED = "torch._inductor.runtime.compile_tasks."


def failed_kernel(error: BaseException | None) -> tuple[str, str] | None:
    """Name and generated source of the Triton kernel behind an exception.

    None where no kernel is behind it, or it cannot be told.
    """
    for each in causes(error):
        named = getattr(each, _KERNEL, None) or _launched_kernel(each)
        if named is not None:
            return named
    return None


def failed_call(error: BaseException | None) -> str | None:
    """The line of generated code that called the operator which raised an exception; None where there is none."""
    for each in causes(error):
        for frame, line in reversed(list(traceback.walk_tb(each.__traceback__))):
            if (frame.f_globals.get("__name__") or "").startswith(_GENERATED):
                text = linecache.getline(frame.f_code.co_filename, line).strip()
                return text if "torch.ops." in text else None
    return None


@contextlib.contextmanager
def noting_calls(note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Tell ``note`` the name and the plain arguments of each operator called within, but for torch's own."""
    with _Noting(note):
        yield


def naming(compile_triton: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's Triton compile, each of whose exceptions says which kernel it is about.

    Kernels compile in other processes, and what comes back is text; which of a graph's kernels failed decides which of
    its nodes steps down.
    """

    def triton(self: AsyncCompile, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        def named(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                setattr(error, _KERNEL, (kernel_name, source_code))
                raise

        kernel = named(compile_triton, self, kernel_name, source_code, *args, **kwargs)
        if isinstance(kernel, CodeCacheFuture):
            kernel.result = functools.partial(named, kernel.result)  # type: ignore[method-assign]
        return kernel

    return triton


class _Noting(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, note: Callable[[str, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace not in ("aten", "prim", "prims"):
            self._note(str(func), (*args, *kwargs.values()))
        return func(*args, **kwargs)


def _launched_kernel(error: BaseException) -> tuple[str, str] | None:
    """The generated kernel that raised at its launch."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kernel = frame.f_globals.get(KERNEL) or frame.f_locals.get("self")
        if isinstance(kernel, CachingAutotuner):
            constants = [kernel.triton_meta, *(config.all_kwargs() for config in kernel.configs or ())]
            return str(kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__), repr(constants)
    return None
