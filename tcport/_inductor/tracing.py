"""Compiled code that other threads run while this thread traces a graph.

A graph whose kernel failed is compiled anew in the middle of a service, beside threads that run compiled code. What
``torch.compile`` returns refuses to be called while a graph is traced; up to torch 2.13 the flag that says so is one
for all threads, and calls that had nothing to do with the trace were refused. From torch 2.14 each thread has its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.fx import _symbolic_trace


def traces_here() -> bool:
    """Whether the calling thread is within a trace: what sets the flag, ``Tracer.trace``, is among its frames."""
    tracer, frame = _symbolic_trace.Tracer.trace.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not tracer:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def tracing_here() -> Iterator[None]:
    """What this thread traces within a ``with`` block is no obstacle to other threads; for one thread at a time."""
    if not hasattr(_symbolic_trace, "_is_fx_tracing_flag"):
        yield
        return
    # Compiled functions hold the function that they ask since they were made, so it is its code that must change.
    asked = _symbolic_trace.is_fx_symbolic_tracing
    code = asked.__code__
    try:
        asked.__code__ = _is_fx_symbolic_tracing.__code__
        yield
    finally:
        asked.__code__ = code


def _is_fx_symbolic_tracing() -> bool:  # its code runs among the globals of torch.fx._symbolic_trace
    from tcport._inductor.tracing import traces_here

    return _is_fx_tracing_flag and not torch.compiler.is_compiling() and traces_here()  # type: ignore[name-defined]  # noqa: F821
