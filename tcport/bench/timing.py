"""How long a call takes on a GPU: medians over replays of a CUDA graph that goes through all copies of its inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def microseconds(run: Callable[[T], object], inputs: Sequence[T], replays: int = 9) -> float:
    """Median time of ``run`` on one of ``inputs``, launch gaps included, host time not."""
    return statistics.median(time for (time,) in alternating([run], inputs, replays))


def alternating(runs: Sequence[Callable[[T], object]], inputs: Sequence[T], rounds: int) -> list[tuple[float, ...]]:
    """Microseconds of each of ``runs`` on one of ``inputs``, round by round.

    Within a round they follow each other, in every other round backwards: what changes with time, such as a clock that
    falls as the device warms up, meets all of them alike.
    """
    repeats = max(1, 8 // len(inputs))
    graphs = [_captured(run, inputs, repeats) for run in runs]
    spans: list[dict[int, tuple[torch.cuda.Event, torch.cuda.Event]]] = []
    for number in range(rounds):
        span = {}
        for place in sorted(range(len(graphs)), reverse=number % 2 == 1):
            span[place] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            span[place][0].record()
            graphs[place].replay()
            span[place][1].record()
        spans.append(span)
    torch.cuda.synchronize()
    calls = len(inputs) * repeats
    return [tuple(start.elapsed_time(end) * 1e3 / calls for _, (start, end) in sorted(span.items())) for span in spans]


def _captured(run: Callable[[T], object], inputs: Sequence[T], repeats: int) -> torch.cuda.CUDAGraph:
    """A graph of ``repeats`` times all of ``inputs``, replayed once."""
    run(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for each in inputs:
                run(each)
    graph.replay()
    return graph


def host_microseconds(
    run: Callable[[], object], calls: int = 200, wait: Callable[[], None] = torch.cuda.synchronize
) -> float:
    """Median time the host spends on one call that is only put into the queue; ``wait`` empties the queue."""
    for _ in range(3):
        run()
    wait()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        wait()
    return statistics.median(times) * 1e6


def glance(run: Callable[[T], object], inputs: T) -> float:
    """Microseconds of one call, launch included: enough to see that it is slow."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(inputs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
