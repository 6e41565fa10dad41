"""Compiler processes: asked one thing after the other, and begun anew where one died or took too long."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

_TIMEOUT = 300.0  # seconds for one kernel; spilling tiles take the compilers up to a minute

_thread = threading.local()


def answers(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ``compile_worker`` says to each request, from one process for all of them."""
    with one_worker() as worker:
        return [worker.ask(request) for request in requests]


def answer_in(line: str) -> dict[str, Any] | None:
    """What a worker answers in a line; None for what compilers print in between, and for a line that was cut short."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


class OutOfTimeError(Exception):
    """The time for this and for every further compile is over."""


@contextlib.contextmanager
def one_worker(end: float | None = None) -> Iterator[Worker]:
    """Within the block all of this thread's compiles go to one process: starting one takes longer than a compile.

    Args:
        end: time (``time.monotonic``) after which compiles raise :class:`OutOfTimeError`, also those under way.
    """
    if (outer := getattr(_thread, "worker", None)) is not None:
        yield outer
        return
    _thread.worker = Worker(end=end)
    try:
        yield _thread.worker
    finally:
        _thread.worker.close()
        _thread.worker = None


class Worker:
    """One compiler process, begun with the first request."""

    def __init__(
        self, module: str = "tcport.tiling.compile_worker", timeout: float = _TIMEOUT, end: float | None = None
    ) -> None:
        self._command = [sys.executable, "-m", module]
        self._timeout = timeout
        self._end = math.inf if end is None else end
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the worker; see close

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The process's answer; an ``error`` where it ended, or did not answer in time.

        Raises:
            OutOfTimeError: past the worker's end.
        """
        timeout = min(self._timeout, self._end - time.monotonic())
        if timeout <= 0:
            raise OutOfTimeError
        try:
            process = self._running()
        except (OSError, TypeError) as error:  # no memory for a process, or no Python: where it is embedded
            return {"error": f"the compiler's process cannot be started: {error}"}
        late = threading.Event()
        timer = threading.Timer(timeout, lambda: (late.set(), process.kill()))
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended; its output says how
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            answer = next(filter(None, map(answer_in, process.stdout)), None)
        finally:
            timer.cancel()
        if answer is not None:
            return answer
        code = process.wait()
        self._process = None
        if late.is_set():
            if timeout < self._timeout:
                raise OutOfTimeError
            return {"error": "the compiler did not finish in time"}
        self._errors.seek(0)
        last = next((line.strip() for line in reversed(self._errors.readlines()) if line.strip()), "no message")
        return {"error": f"the compiler's process ended with code {code}: {last}"}

    def close(self) -> None:
        """End the process; it has nothing left to do."""
        if self._process is not None:
            self._process.communicate()
            self._process = None
        self._errors.close()

    def _running(self) -> Any:
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            self._errors.seek(0)
            self._errors.truncate()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                errors="replace",
                env=environment,
            )
        return self._process
