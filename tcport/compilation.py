"""Compiling one graph: step down the chain of a node whose kernel fails until the graph compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from tcport import _inductor
from tcport.attempt import Attempt
from tcport.attention_only import attention_only
from tcport.cache_folders import settle_cache_folders
from tcport.counting import count
from tcport.errors import KernelBuildError
from tcport.failures import cause_of, cause_within, class_name, details, first_line, own_error, raise_if_sticky
from tcport.logs import logger
from tcport.options import Options
from tcport.report import FallbackReason, GraphReport
from tcport.survival import surviving


def compile_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: GraphReport
) -> Callable[..., Any]:
    """Compile an adapted Dynamo graph with Inductor, tcport's passes and lowerings in it.

    A kernel that fails takes itself, and nothing else, out of the chains of the nodes that it was made for; the step is
    recorded, and the graph is compiled again. The last link (plain PyTorch) leaves nothing of tcport's own to fail.
    Where no compiler works at all, the graph runs uncompiled, its attention by the eager chain, and the report says so.

    Raises:
        KernelBuildError, OutOfResourcesError, KernelLaunchError: see :func:`tcport.chain.step_down`.
    """
    for moved in settle_cache_folders():
        report.note(moved)
    compiled, attempt = _compile(gm, example_inputs, options, report, use_cache=True)
    if not attempt.may_fail_at_launch:
        return compiled

    def compile_anew() -> tuple[Callable[..., Any], Attempt]:
        with _inductor.outside_dynamo(example_inputs):
            return _compile(gm, example_inputs, options, report, use_cache=False)

    return surviving(compiled, attempt, compile_anew)


def _compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: GraphReport, use_cache: bool
) -> tuple[Callable[..., Any], Attempt]:
    while True:
        attempt = Attempt(options, report, use_cache)
        try:
            return attempt.compile(gm, example_inputs), attempt
        except Exception as error:
            if _inductor.must_pass_through(error):
                raise
            if _stepped_down(attempt, error):
                continue
            if not (report.from_cache and use_cache):
                return _uncompiled(gm, options, report, error), attempt
            use_cache = False  # a cached graph does not say which kernels are in it


def _stepped_down(attempt: Attempt, error: Exception) -> bool:
    """Take the kernels behind a failure out of their chains; False when it is no failure of tcport's kernels."""
    if attempt.refused is not None:
        raise attempt.refused from attempt.refused.__cause__
    cause = cause_of(error)
    own = own_error(error)
    if own is not None and cause is None:
        raise own from None
    raise_if_sticky(error, "a kernel being loaded")
    if attempt.broken_off is not None:
        emitted, kernel, error = attempt.broken_off
        cause, failed = cause_within(error), [(emitted, kernel)]
    else:
        failed = attempt.blamed(error)
    if cause is None or not failed:
        return False
    attempt.step_down(failed, error, cause)
    return True


def _uncompiled(
    gm: torch.fx.GraphModule, options: Options, report: GraphReport, error: Exception
) -> Callable[..., Any]:
    """The graph as Dynamo captured it, where the compiler itself does not work; any other error is raised."""
    if cause_of(error) != "toolchain":
        raise error
    if options.strict:
        raise KernelBuildError(
            f"Nothing can be compiled here: {first_line(error)}.", "Drop the option 'strict' to run uncompiled."
        ) from error
    reason = FallbackReason(
        "graph", "Inductor", "uncompiled graph", "toolchain", class_name(error), first_line(error), details(error)
    )
    report.nodes.clear()
    report.fallbacks.append(reason)
    report.note("No compiler works here: the graph runs uncompiled, its attention by the eager chain.")
    logger("chain").warning("%s", reason)
    count("graphs left uncompiled")
    return attention_only(gm, options, report)
