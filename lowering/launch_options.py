"""Compile options of a vendor's own (``waves_per_eu``, ``grf_mode``, ...), added to what a kernel entry launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tcport.kernels.call import Launcher, is_traced


def with_options(launch: Launcher, options: Mapping[str, Any]) -> Launcher:
    """A launcher that compiles with ``options`` besides warps and stages.

    Triton's own launcher takes them as arguments. Traced code takes only warps and stages so; the others have to come
    with the kernel, as the one configuration of an autotuned kernel.
    """
    if not options:
        return launch
    return _OptionedLauncher(launch, dict(options))


class _OptionedLauncher:
    def __init__(self, launch: Launcher, options: dict[str, Any]) -> None:
        self._launch = launch
        self._options = options
        self.traced = is_traced(launch)

    def __call__(self, kernel: Any) -> _Optioned:
        return _Optioned(self._launch, kernel, self._options, self.traced)


class _Optioned:
    def __init__(self, launch: Launcher, kernel: Any, options: dict[str, Any], traced: bool) -> None:
        self._launch = launch
        self._kernel = kernel
        self._options = options
        self._traced = traced

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            if not self._traced:
                return self._launch(self._kernel)[grid](**arguments, **self._options)
            sizes = {name: arguments.pop(name) for name in ("num_warps", "num_stages") if name in arguments}
            return self._launch(_configured(self._kernel, self._options, sizes))[grid](**arguments)

        return run


def _configured(kernel: Any, options: dict[str, Any], sizes: dict[str, int]) -> Any:
    import triton

    return triton.autotune(configs=[triton.Config(dict(options), **sizes)], key=[])(kernel)
