"""What happened in this process: reports of compiles, the collector behind ``explain``, steps down the chain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tcport.counting import count
from tcport.locks import process_lock
from tcport.options import Options
from tcport.report import CompileReport, FallbackReason, GraphReport

_lock = process_lock()
_last: CompileReport | None = None
_collectors: list[CompileReport] = []
_fallbacks: list[FallbackReason] = []


def record(graph: GraphReport, options: Options) -> None:
    """Add a compiled graph to every open collector, and make it the last report."""
    global _last
    count("graphs")
    if graph.from_cache:
        count("graphs from cache")
    with _lock:
        _last = _report_of(graph, options)
        for report in _collectors:
            report.graphs.append(graph)
            report.options = options.to_dict()
            report.device = report.device or _last.device


def last_report() -> CompileReport | None:
    """The report of the newest compile of this process; None before the first."""
    return _last


def record_fallback(reason: FallbackReason) -> None:
    """Note a step down the chain."""
    with _lock:
        _fallbacks.append(reason)


def fallbacks() -> tuple[FallbackReason, ...]:
    """Every step down the chain that this process took, each once."""
    with _lock:
        return tuple(_fallbacks)


@contextlib.contextmanager
def collected() -> Iterator[CompileReport]:
    """A report that gathers every graph compiled within a ``with`` block."""
    report = CompileReport()
    with _lock:
        _collectors.append(report)
    try:
        yield report
    finally:
        with _lock:
            _collectors[:] = [other for other in _collectors if other is not report]  # equal reports are not the same


def _report_of(graph: GraphReport, options: Options) -> CompileReport:
    devices = dict.fromkeys(node.device for node in graph.nodes)
    return CompileReport([graph], ", ".join(devices), options.to_dict())
