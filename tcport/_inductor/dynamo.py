"""What Dynamo is told, and asked."""

from __future__ import annotations

from typing import Any

from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame
from torch._dynamo.utils import counters
from torch._guards import TracingContext


def must_pass_through(error: BaseException) -> bool:
    """Whether an exception is one of Dynamo's signals, which a backend must never swallow."""
    return isinstance(error, (RestartAnalysis, SkipFrame))


def unwrapped(error: Exception) -> Exception:
    """An error of the same class and text that Dynamo hands to the user as it is, not as BackendCompilerFailed."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__str__": kind.__str__}
    bare = type(kind.__name__, (kind, ShortenTraceback), names)  # pyright: ignore[reportGeneralTypeIssues]
    twin = bare.__new__(bare, *error.args)
    twin.__dict__.update(error.__dict__, first_useful_frame=None)
    return twin


def original(fn: Any) -> Any:
    """The function or module behind a compiled one; anything else as it is."""
    return getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None) or fn


def compile_count() -> int:
    """Graphs that Dynamo has handed to a backend in this process, whichever backend it was."""
    return counters["stats"]["unique_graphs"]


def in_dynamo() -> bool:
    """Whether a graph is being captured or compiled for ``torch.compile`` in this thread."""
    return TracingContext.try_get() is not None
