"""The worker of ``.ci/race.py``, over a GPU made of Python."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from race_scripts import ROOT, worker

import tcport
from tcport.bench.accuracy import WrongResultError
from tcport.bench.cases import Case
from tcport.kernels import reference

SMALL = Case("decode", (40, 7, 33), heads=(4, 2), dims=(16, 16))


def test_a_tree_without_its_own_package_is_refused(tmp_path: Path) -> None:
    """Such as one whose package is shadowed by an installed one."""
    with pytest.raises(ImportError, match="tcport comes from .*, not from"):
        worker.DryTree(str(tmp_path)).start()
    assert worker.DryTree(str(ROOT)).start() == {"device": "none, times are invented"}


class Graph:
    """Calls again what was called while it was captured, into the results of then."""

    capturing: Graph | None = None
    replays = 0

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        Graph.replays += 1
        for call in self.calls:
            call()

    def __enter__(self) -> None:
        Graph.capturing = self

    def __exit__(self, *_: object) -> None:
        Graph.capturing = None


class Event:
    """Records how many graphs were replayed: each takes a millisecond."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Graph.replays

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """``kernel`` is what computes; ``options`` what it was given besides tensors."""
    given: dict[str, Any] = {"options": []}

    def paged_attention(
        query: torch.Tensor, *tensors: torch.Tensor, num_splits: int | None = None, **named: Any
    ) -> Any:
        given["options"].append(num_splits)
        out = torch.empty_like(query)

        def call() -> None:
            given["kernel"](out, query, *tensors, **named)

        call()
        if Graph.capturing:
            Graph.capturing.calls.append(call)
        return out

    def right(out: torch.Tensor, *tensors: torch.Tensor, **named: Any) -> None:
        out.copy_(reference.paged_attention(*tensors, **named)[0])

    given["kernel"] = right
    monkeypatch.setattr(tcport, "paged_attention", paged_attention)
    monkeypatch.setattr(worker, "DEVICE", "cpu")
    for name, fake in (("CUDAGraph", Graph), ("graph", lambda graph: graph), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("tcport.bench.inputs.MOST_COPIES", 3)
    yield given
    Graph.replays = 0


def built(num_splits: int | None = None) -> Any:
    fields = json.loads(json.dumps(dataclasses.asdict(SMALL)))
    tree = worker.Tree(str(ROOT))
    return tree, tree.build("small", fields, num_splits)


def test_a_case_is_built_and_timed(gpu: dict[str, Any]) -> None:
    tree, answer = built(33)
    assert 0 <= answer["error"] < 0.01
    assert set(gpu["options"]) == {33}
    case = tree.built["small"]
    assert (case.repeats, case.calls) == (2, 6)  # twice three sets of inputs
    assert case.replays == 3  # of 1 ms each
    before = Graph.replays
    assert tree.time("small") == {"us": pytest.approx(1e3 / 6)}
    assert Graph.replays - before == 4
    built()
    assert gpu["options"][-1] is None


@pytest.mark.parametrize("when", ["eager", "captured"])
def test_a_row_that_is_not_written_is_found(when: str, gpu: dict[str, Any]) -> None:
    right = gpu["kernel"]

    def forgets(out: torch.Tensor, *tensors: torch.Tensor, **named: Any) -> None:
        kept = torch.full_like(out[1], torch.nan) if when == "eager" else out[1].clone()
        right(out, *tensors, **named)
        if when == "eager" or Graph.replays:
            out[1] = kept

    gpu["kernel"] = forgets
    with pytest.raises(AssertionError, match="not finite"):
        built()


def test_wrong_results_are_found(gpu: dict[str, Any]) -> None:
    right = gpu["kernel"]
    gpu["kernel"] = lambda out, *tensors, **named: (right(out, *tensors, **named), out.mul_(1.05))
    with pytest.raises(WrongResultError):
        built()


def test_inputs_are_alike_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "DEVICE", "cpu")
    first = worker.seeded_inputs(SMALL, 2)
    torch.rand(7)
    for one, other in zip(first, worker.seeded_inputs(SMALL, 2), strict=True):
        for name, value in one.arguments.items():
            assert torch.equal(value, other.arguments[name]), name
    assert not torch.equal(first[0].arguments["query"], first[1].arguments["query"])


def test_the_bench_is_the_race_s_own(tmp_path: Path) -> None:
    """Of a tree, only what is raced counts: its bench may make other inputs, or allow other errors."""
    (tmp_path / "tcport" / "bench").mkdir(parents=True)
    (tmp_path / "tcport" / "__init__.py").touch()
    shutil.copy(ROOT / "tcport" / "errors.py", tmp_path / "tcport")
    for name in ("__init__", "cases", "inputs", "accuracy"):
        (tmp_path / "tcport" / "bench" / f"{name}.py").write_text("raise ImportError('the bench of the tree')")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / '.ci')!r}]\n"
        "import race_worker\n"
        "race_worker.use_own_bench()\n"
        "import tcport.bench.accuracy as accuracy, tcport.errors as errors\n"
        "print(accuracy.__file__, errors.__file__, sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == [str(ROOT / "tcport/bench/accuracy.py"), str(tmp_path / "tcport/errors.py")], (
        done.stderr
    )
