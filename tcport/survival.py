"""Compiled code that survives a kernel which does not start: recompiled one link further down, and run again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tcport.attempt import Attempt
from tcport.counting import count
from tcport.errors import KernelLaunchError
from tcport.failures import cause_of, first_line, own_error, raise_if_sticky

CompileAnew = Callable[[], tuple[Callable[..., Any], Attempt]]


def surviving(compiled: Callable[..., Any], attempt: Attempt, compile_anew: CompileAnew) -> Callable[..., Any]:
    """``compiled``, and behind it the rest of the chain.

    Kernels are loaded when a graph is compiled, so a kernel that needs too much of the device fails there. What is left
    is a launch that the driver refuses. Work queued before it may have changed the graph's inputs; the call is repeated
    only where that gives the same result (:mod:`tcport.repeatable`), and fails otherwise, with the next call safe.

    Args:
        compile_anew: compiles the graph with what is left of the chains, its cache off so that the kernels are known.
    """
    survivor = _Survivor(compiled, attempt, compile_anew)

    def run(*args: Any) -> Any:
        return survivor.run(args)

    return run


class _Survivor:
    def __init__(self, compiled: Callable[..., Any], attempt: Attempt, compile_anew: CompileAnew) -> None:
        self._compiled = compiled
        self._attempt = attempt
        self._compile_anew = compile_anew
        self._lock = threading.Lock()

    def run(self, args: tuple[Any, ...]) -> Any:
        while True:
            compiled = self._compiled
            try:
                return compiled(*args)
            except Exception as error:
                if not self._recovered(compiled, error):
                    raise

    def _recovered(self, compiled: Callable[..., Any], error: Exception) -> bool:
        """Replace the compiled code, so that the call can be repeated; False when no kernel is behind the failure.

        Raises:
            KernelLaunchError: the device context is lost, or the call cannot be repeated.
        """
        raise_if_sticky(error, "compiled code")
        cause = cause_of(error)
        if cause is None or (cause == "unavailable" and own_error(error) is None):
            return False  # an operator of the model's own that cannot be imported, say
        with self._lock:
            if self._compiled is compiled:  # no other thread has met the failure first
                if self._attempt.report.from_cache:
                    _, self._attempt = self._compile_anew()
                failed = self._attempt.blamed(error)
                if not failed:
                    return False
                self._attempt.step_down(failed, error, cause)
                if not _capturing():
                    compiled_again, attempt = self._compile_anew()
                    attempt.unrepeatable = attempt.unrepeatable or self._attempt.unrepeatable
                    self._compiled, self._attempt = compiled_again, attempt
                    count("recompiles after a failed launch")
            unrepeatable = "a graph being captured" if _capturing() else self._attempt.unrepeatable
        if unrepeatable is not None:
            raise KernelLaunchError(
                f"A kernel could not be launched ({first_line(error)}), and the call may have changed {unrepeatable} "
                "before.",
                "Restore what the call changes and call again: the next call uses the next kernel of the chain.",
            ) from error
        count("calls run again")
        return True


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
