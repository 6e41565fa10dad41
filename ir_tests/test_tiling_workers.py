"""Compiler processes: one for many requests, and what is said of one that ends, hangs or talks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tcport.tiling.workers import Worker, one_worker

SCRIPT = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "die":
        print("a last word", file=sys.stderr, flush=True)
        os._exit(7)
    if request["do"] == "hang":
        time.sleep(60)
    if request["do"] == "talk":
        print("warning: odd\\n{block: 3}\\n{\\n3", flush=True)
        sys.stdout.buffer.write(b"\\xff\\n")
    print(json.dumps({"process": os.getpid()}), flush=True)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scripted_compiler.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return "scripted_compiler"


def test_one_process_answers_until_it_ends(module: str) -> None:
    worker = Worker(module)
    first, second, third, fourth, fifth = (
        worker.ask({"do": what}) for what in ("answer", "talk", "die", "answer", "answer")
    )
    worker.close()
    assert first == second != fourth == fifth
    assert first.keys() == fourth.keys() == {"process"}
    assert third == {"error": "the compiler's process ended with code 7: a last word"}


def test_one_that_hangs_is_ended(module: str) -> None:
    worker = Worker(module, timeout=2.0)
    assert worker.ask({"do": "hang"}) == {"error": "the compiler did not finish in time"}
    worker.close()


def test_a_thread_has_one_worker_at_a_time() -> None:
    with one_worker() as outer, one_worker() as inner:
        assert inner is outer
    with one_worker() as another:
        assert another is not outer


@pytest.mark.parametrize("python", ["", None, "/nowhere/python"])
def test_one_that_cannot_be_started_is_an_answer(python: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python is embedded, ``sys.executable`` may be any of these."""
    monkeypatch.setattr(sys, "executable", python)
    worker = Worker()
    assert "the compiler's process cannot be started" in worker.ask({})["error"]
    worker.close()
