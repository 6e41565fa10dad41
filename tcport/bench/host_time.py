"""Host time of a call: ``python -m tcport.bench.host_time``.

A row is a graph, called eagerly, compiled, as Inductor's generated code alone, and as that code without its launches of
Triton kernels. What compiled code takes beyond the generated code are Dynamo's guards and AOTAutograd's wrappers, which
the row of a plain graph, compiled by Inductor as it is, has as well.

A model has many attentions in one graph, and each costs what a graph with one more takes more: of layers with caches of
their own, each a write and an attention, there are a row of one, a row of many, and the difference for a layer. The
rows of plain kernels have two Triton kernels of the user's in a layer instead, on a CPU two operators.

Calls are put into the queue of an idle device, one at a time; on a CPU their times hold the work itself, so its sizes
are small. A time is the least of the medians of some rounds, between which the other forms of the graph are called: a
host has spells in which all takes twice as long.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import os
import pstats
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tcport._inductor.calls import generated_code
from tcport._inductor.launch import launching_nothing
from tcport.bench.host_graphs import KNOWN, SUBJECTS, Subject
from tcport.bench.timing import host_microseconds
from tcport.device import device_profile
from tcport.fingerprint import triton_version

_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """Microseconds of the host for one call.

    Attributes:
        eager: of the operators. compiled: of the whole compiled call. generated: of Inductor's code within it.
        unlaunched: of that code when it launches no Triton kernel.
        launches: Triton kernels in that code. operators: calls of operators in it. tensors: that it allocates.
    """

    name: str
    eager: float
    compiled: float
    generated: float
    unlaunched: float
    launches: float
    operators: float
    tensors: float

    def __str__(self) -> str:
        name, *numbers = dataclasses.astuple(self)
        times = "".join(f"{time:11.1f}" for time in numbers[:4])
        return f"{name:42}{times}" + "".join(f"{count:10g}" for count in numbers[4:])

    def each_beyond(self, first: Row, number: int) -> Row:
        """What each of ``number`` layers takes, by which this graph is longer than ``first``."""
        many, one = (dataclasses.astuple(row)[1:] for row in (self, first))
        return Row(
            "  each layer more", *((of_many - of_one) / number for of_many, of_one in zip(many, one, strict=True))
        )


def main() -> None:
    """Print the table."""
    names = [subject.name for subject in SUBJECTS]
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    options.add_argument("--calls", type=int, default=300, help="calls of each form (default: 300)")
    options.add_argument("--graph", nargs="+", default=names, choices=names, help="default: all")
    options.add_argument("--layers", type=int, default=9, help="of a graph with many, at least 2 (default: 9)")
    options.add_argument("--profile", type=int, default=0, metavar="N", help="print the N functions that take longest")
    given = options.parse_args()
    if given.layers < 2:
        options.error("--layers: a graph of many layers has at least 2.")
    device = device_profile(given.device).name
    print(f"{device}, {os.cpu_count()} CPUs, torch {torch.__version__}, triton {triton_version()}; microseconds")
    heads = "".join(f"{head:>11}" for head in ("eager", "compiled", "generated", "unlaunched"))
    print(f"{'graph':42}{heads}" + "".join(f"{head:>10}" for head in ("launches", "operators", "tensors")))
    with torch.no_grad():
        for subject in SUBJECTS:
            if subject.name in given.graph:
                for row in _rows(subject, given):
                    print(row, flush=True)


def _rows(subject: Subject, given: argparse.Namespace) -> Iterator[Row]:
    for dynamic in (False, True) if subject.layered or subject.name in KNOWN else (True,):
        one = measure(subject, given.device, dynamic, given.calls, functions=given.profile)
        yield one
        if subject.layered:
            many = measure(subject, given.device, dynamic, given.calls, given.layers, given.profile)
            yield many
            yield many.each_beyond(one, given.layers - 1)


def measure(subject: Subject, device: str, dynamic: bool, calls: int, layers: int = 1, functions: int = 0) -> Row:
    """Time one graph.

    Args:
        dynamic: compile it for sizes that are open.
        layers: of a graph that is layered.
        functions: print as many functions of a compiled call, by the time they take themselves.
    """
    args = subject.inputs(device, layers)
    torch.compiler.reset()
    # A graph of tcport's from the cache is not chosen anew.
    anew: dict[str, Any] | None = {"force_disable_caches": True} if subject.backend == "tcport" else None
    compiled = torch.compile(subject.graph, backend=subject.backend, fullgraph=True, dynamic=dynamic, options=anew)
    torch.testing.assert_close(compiled(*args), subject.graph(*args), rtol=2e-2, atol=2e-2)
    code, source = generated_code(compiled, *args)
    wait = _waiting(device)
    runs = (lambda: subject.graph(*args), lambda: compiled(*args), code)
    rounds = []
    for _ in range(_ROUNDS):
        each = -(-calls // _ROUNDS)
        medians = [host_microseconds(run, each, wait) for run in runs]
        with launching_nothing():
            rounds.append((*medians, host_microseconds(code, each, wait)))
    times = [min(medians) for medians in zip(*rounds, strict=True)]
    if functions:
        _print_profile(runs[1], calls, functions, wait)
    name = f"{subject.name}: {layers}" if subject.layered else subject.name
    patterns = (r"\.run\(", r"torch\.ops\.[\w.]+\(", r"= empty_strided\w*\(")
    counts = (len(re.findall(pattern, source)) for pattern in patterns)
    return Row(f"{name}, {'open' if dynamic else 'known'} sizes", *times, *counts)


def _waiting(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _print_profile(run: Callable[[], object], calls: int, functions: int, wait: Callable[[], None]) -> None:
    profile = cProfile.Profile()
    for _ in range(calls):
        profile.enable()
        run()
        profile.disable()
        wait()
    pstats.Stats(profile).sort_stats("tottime").print_stats(functions)


if __name__ == "__main__":
    main()
