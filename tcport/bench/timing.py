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
    run(inputs[0])
    torch.cuda.synchronize()
    repeats = max(1, 8 // len(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for each in inputs:
                run(each)
    graph.replay()
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in spans:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans) * 1e3 / (len(inputs) * repeats)


def host_microseconds(run: Callable[[], object], calls: int = 200) -> float:
    """Median time the host spends on one call that is only put into the queue."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(times) * 1e6
