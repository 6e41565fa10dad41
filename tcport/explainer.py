"""``tcport.explain``: what a compile of a function finds and chooses, without trusting any cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tcport import _inductor, history
from tcport.backend import tcport as backend
from tcport.report import CompileReport


def explain(
    fn: Callable[..., Any],
    *args: Any,
    explain_options: Mapping[str, Any] | None = None,
    explain_dynamic: bool | None = None,
    **kwargs: Any,
) -> CompileReport:
    """Compile ``fn`` anew, run it once on the arguments, and report.

    Inductor's caches are off for this compile, as a cached graph has no passes or lowerings left to report on. The
    function really runs: what it writes into a KV cache is written.

    Args:
        fn: a function or module; a compiled one is unwrapped.
        explain_options: as ``options`` of ``torch.compile``.
        explain_dynamic: as ``dynamic`` of ``torch.compile``.
        *args, **kwargs: the arguments of ``fn``.

    Returns:
        The report; print it, or take ``to_dict()``.
    """
    options = {"force_disable_caches": True, **(explain_options or {})}

    def explaining(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return backend(gm, example_inputs, options=options)

    with history.collected() as report:
        torch.compile(_inductor.original(fn), backend=explaining, dynamic=explain_dynamic)(*args, **kwargs)
    report.options.pop("inductor", None)
    return report
