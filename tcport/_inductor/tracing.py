"""Compiled code that other threads run while this thread traces a graph.

A graph whose kernel failed is compiled anew in the middle of a service, beside threads that run compiled code. What
``torch.compile`` returns refuses to be called while a graph is traced; up to torch 2.13 the flag that says so is one
for all threads, and calls that had nothing to do with the trace were refused. From torch 2.14 each thread has its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch.fx import _symbolic_trace

_tracing: set[int] = set()


def traces_here() -> bool:
    """Whether the calling thread is within :func:`tracing_here`."""
    return threading.get_ident() in _tracing


@contextlib.contextmanager
def tracing_here() -> Iterator[None]:
    """What is traced within a ``with`` block is no obstacle to other threads; for one thread at a time.

    A thread that itself traces over compiled code meanwhile, with a tracer of its own, is not told that it may not.
    """
    if traces_here() or not hasattr(_symbolic_trace, "_is_fx_tracing_flag"):
        yield
        return
    # Compiled functions hold the function that they ask since they were made, so it is its code that must change.
    asked = _symbolic_trace.is_fx_symbolic_tracing
    code, here = asked.__code__, threading.get_ident()
    _tracing.add(here)
    asked.__code__ = _is_fx_symbolic_tracing.__code__
    try:
        yield
    finally:
        asked.__code__ = code
        _tracing.discard(here)


def _is_fx_symbolic_tracing() -> bool:  # its code runs among the globals of torch.fx._symbolic_trace
    from tcport._inductor.tracing import traces_here

    return _is_fx_tracing_flag and not torch.compiler.is_compiling() and traces_here()  # type: ignore[name-defined]  # noqa: F821
