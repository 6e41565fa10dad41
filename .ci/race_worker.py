"""One tree's process of ``.ci/race.py``: builds each case, checks it against fp32, captures it, and times it when told.

A line of stdin is a JSON list, ``[method of Tree, *arguments]``; its answer is one line of JSON on stdout. The tree's
``tcport`` is what is raced; cases, inputs and the check come from the bench beside this file, alike for every tree.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import statistics
import sys
import traceback
import types
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1] / "tcport" / "bench"
DEVICE = "cuda"
LONG_FLOPS = 1e12
"""A call of so many takes milliseconds: one in a graph is enough, and its inputs are no matter for the L2 cache."""
CALLS = 8
"""About so many calls are in the graph of a shorter case, or one with each set of its inputs."""
BURST_US = 3000.0
"""Short, so that the heat of one tree's burst is not another's disadvantage."""
REPLAYS = range(3, 17)


def main(folder: str, dry: bool) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a tree prints is no answer
    tree = DryTree(folder) if dry else Tree(folder)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = getattr(tree, method)(*arguments)
        except Exception as failure:  # noqa: BLE001 - the race reports it and goes on without this tree
            traceback.print_exc()
            answer = {"failed": f"{type(failure).__name__}: {failure}"}
        print(json.dumps(answer), file=answers, flush=True)


class DryTree:
    """Invented times, without torch."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).resolve()

    def start(self) -> dict[str, Any]:
        """What the times depend on, but for the tree."""
        self._belongs()
        return {"device": "none, times are invented"}

    def build(self, name: str, fields: dict[str, Any], num_splits: int | None) -> dict[str, Any]:
        """The largest error of a case, and what there is to say of how it runs."""
        return {"error": 0.0, "remark": ""}

    def time(self, name: str) -> dict[str, float]:
        """Microseconds of a call: the median over the replays of a burst."""
        return {"us": random.uniform(99, 101)}

    def _belongs(self) -> None:
        found = importlib.util.find_spec("tcport")
        if not found or not found.origin or not Path(found.origin).resolve().is_relative_to(self.folder):
            raise ImportError(f"tcport comes from {found and found.origin}, not from {self.folder}")


class Tree(DryTree):
    """Times on the GPU."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.built: dict[str, Built] = {}

    def start(self) -> dict[str, Any]:
        self._belongs()
        use_own_bench()
        import torch
        import triton

        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        return {**about, "python": sys.version.split()[0]}

    def build(self, name: str, fields: dict[str, Any], num_splits: int | None) -> dict[str, Any]:
        before = len(fallbacks())
        self.built[name] = built = Built(case_of(fields), {"num_splits": num_splits} if num_splits else {})
        return {"error": built.error, "remark": "; ".join(str(step) for step in fallbacks()[before:])}

    def time(self, name: str) -> dict[str, float]:
        return {"us": statistics.median(self.built[name].burst())}


class Built:
    """A captured case whose results are right, in eager calls and in the graph."""

    def __init__(self, case: Any, options: dict[str, Any]) -> None:
        import torch

        import tcport
        from tcport.bench.accuracy import sample

        inputs = seeded_inputs(case, 1 if case.flops > LONG_FLOPS else None)
        self.repeats = 1 if case.flops > LONG_FLOPS else max(1, CALLS // len(inputs))
        self.inputs, self.calls = inputs, self.repeats * len(inputs)

        def run(number: int) -> Any:
            return tcport.paged_attention(**inputs[number].arguments, **options)

        run(0)  # compiles, tests itself and is remembered
        torch.cuda.synchronize()
        expected = {number: sample(inputs[number]) for number in {0, len(inputs) - 1}}
        poison(inputs[0].arguments["query"])
        self.error = checked(inputs[0], run(0), expected[0])
        for number in range(len(inputs)):
            run(number)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.outs: list[Any] = [None] * len(inputs)
        with torch.cuda.graph(self.graph):
            for _ in range(self.repeats):
                for number in range(len(inputs)):
                    self.outs[number] = run(number)
        for out in self.outs:
            out.fill_(torch.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        for number, wanted in expected.items():
            self.error = max(self.error, checked(inputs[number], self.outs[number], wanted))
        (once,) = self._timed(1)
        self.replays = max(REPLAYS[0], min(REPLAYS[-1], round(BURST_US / (once * self.calls))))

    def burst(self) -> list[float]:
        """Microseconds of a call in each replay but the first: the GPU has just turned to this process."""
        self.graph.replay()
        return self._timed(self.replays)

    def _timed(self, replays: int) -> list[float]:
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.calls for start, end in itertools.pairwise(events)]


def use_own_bench() -> None:
    """``tcport.bench`` is the one beside this file, whichever ``tcport`` is raced: one input maker, one check."""
    package = types.ModuleType("tcport.bench")
    package.__path__ = [str(BENCH)]
    sys.modules["tcport.bench"] = package


def case_of(fields: dict[str, Any]) -> Any:
    """A case from its fields, whose tuples JSON made lists."""
    from tcport.bench.cases import Case

    return Case(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def seeded_inputs(case: Any, copies: int | None) -> list[Any]:
    """The sets of tensors of a case, alike in every process."""
    import torch

    from tcport.bench.inputs import make_inputs

    torch.manual_seed(0)
    return make_inputs(case, DEVICE, copies)


def poison(like: Any) -> None:
    """NaN in memory that is given back at once, where the next call puts its results and partial sums."""
    import torch

    scraps = [torch.full_like(like, torch.nan) for _ in range(4)]
    scraps += [torch.full((1 << bits,), torch.nan, device=like.device) for bits in (10, 16, 20, 22)]
    del scraps


def checked(inputs: Any, out: Any, expected: Any) -> float:
    """The largest error of a result: all of it is written, and a sample of it is as fp32 has it."""
    from tcport.bench.accuracy import check

    if not out.isfinite().all():
        raise AssertionError("some of the results are not finite: not written, or wrong")
    return check(inputs, out, expected)


def fallbacks() -> tuple[Any, ...]:
    """The tree's own record of steps down its chain of kernels; a tree that keeps none says nothing."""
    return getattr(sys.modules.get("tcport.history"), "fallbacks", tuple)()


if __name__ == "__main__":
    main(sys.argv[1], "--dry" in sys.argv[2:])
