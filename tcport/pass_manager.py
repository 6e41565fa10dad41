"""Runs graph passes in the order their declarations ask for, and checks the graph after each."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import networkx as nx
import torch.fx

from tcport.errors import (
    OptionError,
    PassConditionError,
    PassMatchError,
    PassOrderError,
    PassRaisedError,
    PassResultError,
    TcportError,
)
from tcport.graph_pass import Condition, GraphPass, PassContext, Stage, registered_passes
from tcport.options import Options
from tcport.pass_checks import Snapshot, check_after
from tcport.pass_dump import Dump
from tcport.report import PassReport


def run_passes(
    graph: torch.fx.Graph, passes: Iterable[GraphPass], ctx: PassContext, *, spent: int = 0
) -> list[PassReport]:
    """Run passes one after the other, and check the graph after each (see :mod:`tcport.pass_checks`).

    Each pass costs one unit of fuel; when the option ``pass_fuel`` is spent, the remaining passes do not run, so that a
    wrong result can be bisected to the pass that made it. ``TCPORT_DUMP=dir`` writes the graph before and after each.

    Args:
        spent: units of fuel that passes of earlier stages have used.

    Raises:
        PassError: of the class that names the cause: a condition did not hold, or a pass raised, returned something
            other than a count, or left a graph that breaks a rule.
    """
    reports = []
    dump = Dump.from_environment(os.environ.get("TCPORT_DUMP"))
    for number, graph_pass in enumerate(passes, spent):
        if ctx.options.pass_fuel is not None and number >= ctx.options.pass_fuel:
            break
        reports.append(_run_pass(graph, graph_pass, ctx, dump))
    return reports


def _run_pass(graph: torch.fx.Graph, graph_pass: GraphPass, ctx: PassContext, dump: Dump) -> PassReport:
    name, stage = graph_pass.name, graph_pass.stage
    for condition in graph_pass.requires:
        if (reason := _asked(condition, graph, name)) is not None:
            raise PassConditionError(
                f"Pass {name!r} requires {_name(condition)}, but {reason}.",
                "Order it after the pass that sees to that, or drop the condition.",
            )
    before = Snapshot.of(graph, stage)
    dump.write(graph, name, "before")
    try:
        matches = graph_pass.run(graph, ctx)
    except TcportError:
        raise
    except Exception as error:
        raise PassRaisedError(
            f"Pass {name!r} raised {type(error).__name__}{_place(error, graph_pass)}: {str(error).rstrip('.')}.",
            f"Mend the pass, or leave it out with options={{'disable_passes': [{name!r}]}}.",
        ) from error
    notes, saved = ctx.take_notes(), ctx.take_saved()
    try:
        if isinstance(matches, bool) or not isinstance(matches, int) or matches < 0:
            raise PassResultError(
                f"Pass {name!r} returned {matches!r}.", "Return the number of matches, 0 if there were none."
            )
        check_after(graph, before, name, ctx, matches, stage)
    finally:
        dump.write(graph, name, "after")  # with the values that the check derived, and when it refuses the graph too
    if graph_pass.must_match and matches == 0:
        why = f" It left: {'; '.join(notes)}." if notes else ""
        raise PassMatchError(
            f"Pass {name!r} matched nothing in a graph of {len(graph.nodes)} nodes, and is registered with "
            f"must_match.{why}",
            "Compare its pattern with the graph that TCPORT_DUMP=dir writes before it.",
        )
    for condition in graph_pass.ensures:
        if (reason := _asked(condition, graph, name)) is not None:
            raise PassConditionError(
                f"Pass {name!r} does not ensure {_name(condition)}: {reason}.", "Mend the pass, or drop the condition."
            )
    return PassReport(name, matches, stage, notes, saved[0], saved[1] if isinstance(saved[1], int) else str(saved[1]))


def _place(error: Exception, graph_pass: GraphPass) -> str:
    """Where in a pass's own file an error came from: what wraps it in a compile may not show its traceback."""
    own = getattr(getattr(graph_pass.run, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f" at {os.path.basename(str(own))}:{lines[-1]}" if lines else ""


def _asked(condition: Condition, graph: torch.fx.Graph, name: str) -> str | None:
    """What a condition of a pass says of a graph."""
    what = f"The condition {_name(condition)} of pass {name!r}"
    try:
        reason = condition(graph)
    except Exception as error:
        raise PassConditionError(
            f"{what} raised {type(error).__name__}: {str(error).rstrip('.')}.", "Mend the condition, or drop it."
        ) from error
    if reason is not None and not isinstance(reason, str):
        raise PassConditionError(
            f"{what} returned {reason!r}.", "Return None where it holds, and the reason, a text, where it does not."
        )
    return reason


def _name(condition: Callable[..., Any]) -> str:
    return getattr(condition, "__name__", repr(condition))


def active_passes(options: Options, stage: Stage) -> list[GraphPass]:
    """The passes of one stage that run under these options, in order.

    Raises:
        OptionError: an option names a pass that is not registered.
        PassOrderError: see :func:`ordered`.
    """
    known = registered_passes()
    for name in (*(options.passes or ()), *options.disable_passes):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"Registered: {', '.join(known)}."
            raise OptionError(f"The options name a pass {name!r} that is not registered.", hint)
    chosen = [p for p in known.values() if options.passes is None or p.name in options.passes]
    chosen = [p for p in ordered(chosen, known) if p.name not in options.disable_passes]
    return [p for p in chosen if p.stage == stage]


def ordered(passes: Iterable[GraphPass], known: Iterable[str]) -> list[GraphPass]:
    """Passes in an order that satisfies every ``after`` and ``before``; ties keep the order of registration.

    Raises:
        PassOrderError: the declarations form a cycle, or name a pass that does not exist.
    """
    passes, known = list(passes), set(known)
    by_name = {p.name: p for p in passes}
    dag = nx.DiGraph()
    dag.add_nodes_from(by_name)
    for p in passes:
        for other in (*p.after, *p.before):
            if other not in known:
                close = difflib.get_close_matches(other, known, n=1)
                hint = f"Did you mean {close[0]!r}?" if close else f"Registered: {', '.join(sorted(known))}."
                raise PassOrderError(f"Pass {p.name!r} is ordered against an unknown pass {other!r}.", hint)
        dag.add_edges_from((other, p.name) for other in p.after if other in by_name)
        dag.add_edges_from((p.name, other) for other in p.before if other in by_name)
    rank = {p.name: number for number, p in enumerate(passes)}
    try:
        return [by_name[name] for name in nx.lexicographical_topological_sort(dag, key=rank.__getitem__)]
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(dag)]
        raise PassOrderError(
            f"The order of the passes {' -> '.join([*cycle, cycle[0]])} is a cycle.",
            "Drop one of their 'after' or 'before' declarations.",
        ) from None
