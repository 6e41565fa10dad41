"""What Dynamo is told, and asked."""

from __future__ import annotations

from typing import Any

from torch._dynamo.backends import registry
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


def register_in_any_thread(name: str) -> None:
    """Let threads that look up a backend for the first time at once all have it.

    Each of them loads the entry point, which takes as long as the import of what is behind it, and then registers what
    it loaded; torch 2.11 to 2.13 refuse that to all but the first ("duplicate name"), and have looked up the function
    that refuses before the entry point is loaded. So it is what they ask that has to answer: a registered backend of
    this name is no obstacle.
    """
    known = registry._COMPILER_FNS
    if isinstance(known, _RegisteredAgain):
        known.names.add(name)
        return
    again = _RegisteredAgain(known, name)
    registry._COMPILER_FNS = again
    again.update(known)  # whatever another thread has registered meanwhile


class _RegisteredAgain(dict[str, Any]):
    """Backends by name, some of which never seem to be there yet."""

    def __init__(self, known: dict[str, Any], name: str) -> None:
        super().__init__(known)
        self.names = {name}

    def __contains__(self, name: object) -> bool:
        return name not in self.names and super().__contains__(name)


def in_dynamo() -> bool:
    """Whether a graph is being captured or compiled for ``torch.compile`` in this thread."""
    return TracingContext.try_get() is not None
