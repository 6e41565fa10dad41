"""The processes of ``.ci/race.py``, one for each tree, the order in which they are timed, and what their times say."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

WORKER = Path(__file__).resolve().with_name("race_worker.py")
START_S, BUILD_S, BURST_S = 180.0, 300.0, 60.0
"""The longest that a process may take to start, to build one case, and to time it once."""
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TCPORT_CACHE_DIR", "XDG_CACHE_HOME")

Rounds = list[dict[str, float]]
"""Microseconds by label, round by round."""


class Runner(Protocol):
    """What the race needs of a tree's process: ``failed`` says by case why it is left out."""

    label: str
    failed: dict[str, str]

    def ask(self, limit: float, method: str, *arguments: Any) -> dict[str, Any]: ...


class Worker:
    """A tree's process. ``home`` holds its caches and its log; two processes of one tree share it."""

    def __init__(self, label: str, tree: Path, home: Path, dry: bool = False) -> None:
        self.label = label
        self.failed: dict[str, str] = {}
        self._ended = ""
        home.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            **{name: str(home / name.lower()) for name in CACHES},
            "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, str(WORKER), str(tree), *(["--dry"] if dry else [])]
        handle, self._log = tempfile.mkstemp(".log", dir=home)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": handle}
        self._process = subprocess.Popen(command, env=environment, cwd=home, text=True, **pipes)
        os.close(handle)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, limit: float, method: str, *arguments: Any) -> dict[str, Any]:
        """Its answer; ``failed`` is that of a process that has ended, or is ended for taking over ``limit`` seconds."""
        assert self._process.stdin
        if self._ended:
            return {"failed": self._ended}
        line = ""
        try:
            print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            self._process.kill()
            self._ended = f"{method} was not done in {limit:g} s"
        except OSError:
            pass  # it has ended, and its log says why
        if line:
            return json.loads(line)
        self.end()
        tail = Path(self._log).read_text(errors="replace").strip()[-300:]
        self._ended = self._ended or f"its process ended with {self._process.returncode}: {tail}"
        return {"failed": self._ended}

    def end(self) -> None:
        """Have the process end, which it does when its input does, unless it is busy."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def build(workers: Sequence[Runner], cases: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every case in every process, side by side, for that is the host's work: by label, what it answered by case.

    The answer to ``start`` is among them; ``cases`` has the arguments of the worker's ``build`` by name.
    """
    answers: dict[str, dict[str, Any]] = {worker.label: {} for worker in workers}

    def prepare(worker: Runner) -> None:
        answers[worker.label]["start"] = started = worker.ask(START_S, "start")
        for name, arguments in cases.items():
            answer = started if "failed" in started else worker.ask(BUILD_S, "build", name, *arguments)
            answers[worker.label][name] = answer
            if "failed" in answer:
                worker.failed[name] = answer["failed"]

    threads = [threading.Thread(target=prepare, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def race(workers: Sequence[Runner], cases: Iterable[str], seconds: float, shuffle: random.Random) -> dict[str, Rounds]:
    """Times of each case, round by round, from one process at a time; the first round is always finished.

    A round draws the order of the cases anew, and of the processes within each. One that fails a case, here or when it
    was built, is left out of it, with the times it had.
    """
    rounds: dict[str, Rounds] = {name: [] for name in cases}
    until = time.monotonic() + seconds
    first = True
    while first or time.monotonic() < until:
        for name in shuffle.sample(list(rounds), len(rounds)):
            times: dict[str, float] = {}
            for worker in shuffle.sample(workers, len(workers)):
                answer = {} if name in worker.failed else worker.ask(BURST_S, "time", name)
                if "failed" in answer:
                    worker.failed[name] = answer["failed"]
                elif answer:
                    times[worker.label] = answer["us"]
            rounds[name].append(times)
            if not first and time.monotonic() >= until:
                break
        first = False
        if all(name in worker.failed for worker in workers for name in rounds):
            break
    running = {name: {worker.label for worker in workers if name not in worker.failed} for name in rounds}
    return {
        name: [{label: us for label, us in times.items() if label in running[name]} for times in of_case]
        for name, of_case in rounds.items()
    }


@dataclasses.dataclass(frozen=True)
class Summary:
    """Microseconds of a tree in a case: median and quartiles over the rounds, and its ratios to the first tree.

    Attributes:
        ratio: of the medians; None where the first tree has no times.
        paired: the median of the ratios within each round, whose times were taken at about the same heat.
    """

    us: float
    quartiles: tuple[float, float]
    ratio: float | None
    paired: float | None
    rounds: int


def summary(rounds: Rounds, label: str, first: str) -> Summary | None:
    """None where the tree has no times."""
    own = [times[label] for times in rounds if label in times]
    if not own:
        return None
    median = statistics.median(own)
    low, _, high = statistics.quantiles(own, n=4, method="inclusive") if len(own) > 1 else (median,) * 3
    base = [times[first] for times in rounds if first in times]
    pairs = [times[label] / times[first] for times in rounds if label in times and first in times]
    ratio = median / statistics.median(base) if base else None
    return Summary(median, (low, high), ratio, statistics.median(pairs) if pairs else None, len(own))
