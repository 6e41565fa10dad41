"""Graphs as passes see them, without compiling any: captured, changed by passes, run operation by operation."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tcport import _inductor, passes  # noqa: F401  (passes registers tcport's own)
from tcport.adapter import adapt
from tcport.attempt import run_stage
from tcport.device import DeviceProfile, device_profile
from tcport.errors import ArgumentError, PassMatchError, TcportError
from tcport.graph_pass import STAGES, GraphPass, PassContext, PassFn, Stage, registered_passes
from tcport.options import parse_options
from tcport.pass_manager import run_passes
from tcport.report import GraphReport, PassReport
from tcport.testing.graph_lines import graph_of


class _Captured(BaseException):
    """Leaves Dynamo and Inductor once the graph is there; nothing on the way may take it for a failure."""


def capture(
    fn: Callable[..., Any],
    *args: Any,
    stage: Stage = "functional",
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> torch.fx.GraphModule:
    """The graph that the passes of a stage are given for a function; the function itself is not run.

    Args:
        fn: a function or module that Dynamo captures as one graph.
        *args, **kwargs: its arguments.
        stage: see :data:`tcport.graph_pass.Stage`; the passes of the stages before it have run.
        dynamic: as in ``torch.compile``.
        options: as in ``torch.compile(..., backend="tcport")``.

    Returns:
        The graph; fake values are in ``meta["example_value"]`` at the stage ``dynamo``, else in ``meta["val"]``.

    Raises:
        ArgumentError: the stage is unknown.
        TcportError: whatever an earlier pass raises.
    """
    if stage not in STAGES:
        raise ArgumentError(f"There is no stage {stage!r}.", f"Give one of {', '.join(map(repr, STAGES))}.")
    parsed = parse_options(None, options, _inductor.config_names)
    graphs: list[torch.fx.GraphModule] = []

    def take(gm: torch.fx.GraphModule) -> None:
        graphs.append(gm)
        raise _Captured

    def functional(gm: torch.fx.GraphModule) -> None:
        if stage == "inplace":
            run_stage(gm.graph, "functional", parsed, GraphReport())
        take(gm)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if stage == "dynamo":
            take(gm)
        run_stage(gm.graph, "dynamo", parsed, GraphReport())
        gm.recompile()
        adapt(gm)
        return _inductor.interpret_graph(gm, example_inputs, functional)

    torch.compiler.reset()
    try:
        torch.compile(_inductor.original(fn), backend=_as_raised(backend), fullgraph=True, dynamic=dynamic)(
            *args, **kwargs
        )
    except _Captured:
        pass
    finally:
        torch.compiler.reset()
    return graphs[0]


def interpreted(
    fn: Callable[..., Any],
    *,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    report: GraphReport | None = None,
    profile: Callable[[torch.device], DeviceProfile] = device_profile,
    after: Callable[[torch.fx.Graph], None] | None = None,
) -> Callable[..., Any]:
    """``fn`` compiled as by ``backend="tcport"``, but its graphs, after all passes, run operation by operation.

    What passes do to the results shows in a fraction of the time that code generation takes.

    Args:
        report: gets the reports of the passes.
        profile: the facts of a device; another function pretends another device.
        after: given each graph after its passes.
    """
    parsed = parse_options(None, options, _inductor.config_names)
    report = GraphReport() if report is None else report

    def rewrite(gm: torch.fx.GraphModule) -> None:
        for stage in ("functional", "inplace"):
            run_stage(gm.graph, stage, parsed, report, profile)
        if after is not None:
            after(gm.graph)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run_stage(gm.graph, "dynamo", parsed, report, profile)
        gm.recompile()
        adapt(gm)
        return _inductor.interpret_graph(gm, example_inputs, rewrite)

    return torch.compile(_inductor.original(fn), backend=_as_raised(backend), dynamic=dynamic)


def _as_raised(backend: Callable[..., Any]) -> Callable[..., Any]:
    """A backend whose tcport errors reach the caller as they are, as those of ``backend="tcport"`` do."""

    @functools.wraps(backend)
    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return backend(gm, example_inputs)
        except TcportError as error:
            raise _inductor.unwrapped(error) from error.__cause__

    return compile_graph


def run_pass(
    graph_pass: str | PassFn,
    graph: torch.fx.GraphModule | torch.fx.Graph,
    *,
    stage: Stage = "functional",
    matches: int | None = None,
    options: Mapping[str, Any] | None = None,
    profile: DeviceProfile | None = None,
) -> PassReport:
    """Run one pass on a graph, with every check that follows a pass in a compile.

    Args:
        graph_pass: the name of a registered pass, or the function of one that is not.
        graph: changed in place; take it from :func:`capture`.
        stage: of a pass given as a function.
        matches: how many matches there must be; None: any number.
        options: as in ``torch.compile(..., backend="tcport")``.
        profile: the device that the pass is told of; None: the one the tensors lie on.

    Raises:
        ArgumentError: no pass has that name, or ``graph`` is none.
        PassMatchError: another number of matches than ``matches``; the text says what the pass left, and why.
        PassError: see :func:`tcport.pass_manager.run_passes`.
    """
    if isinstance(graph_pass, str):
        known = registered_passes()
        if graph_pass not in known:
            close = difflib.get_close_matches(graph_pass, known, n=1)
            raise ArgumentError(
                f"There is no pass named {graph_pass!r}.",
                f"Did you mean {close[0]!r}?" if close else f"Registered: {', '.join(known)}.",
            )
        chosen = known[graph_pass]
    else:
        chosen = GraphPass(getattr(graph_pass, "__name__", "pass"), graph_pass, stage=stage)
    module = graph if isinstance(graph, torch.fx.GraphModule) else None
    facts = device_profile if profile is None else lambda device: profile
    context = PassContext(parse_options(None, options, _inductor.config_names), facts)
    report = run_passes(graph_of(graph), [chosen], context)[0]
    if module is not None:
        module.recompile()
    if matches is not None and report.matches != matches:
        left = f" It left: {'; '.join(report.notes)}." if report.notes else ""
        raise PassMatchError(
            f"Pass {chosen.name!r} matched {report.matches} times, not {matches}.{left}",
            "Print the graph with gm.print_readable() and compare it with what the pass looks for.",
        )
    return report
