"""Field case A11: what a compiled step allocates is a matter of its tokens, not of the size of the caches."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from cache_writes import KV_HEADS, PAGE, layer, step
from torch import Tensor

DIM = 8


def halves(pages: int) -> tuple[Tensor, ...]:
    """K and V as the halves of one storage that are passed as two inputs, which Inductor alone copies."""
    return torch.zeros(2, pages, PAGE, KV_HEADS, DIM).unbind()


def allocated(fn: object, *args: Tensor) -> list[int]:
    """Sizes in bytes of all memory that a call allocates on the CPU, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        fn(*args)  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    sizes = [int(event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    return [size for size in sizes if size > 0]


def test_the_measure_sees_a_copy() -> None:
    (cache, _) = halves(4096)
    assert cache.nbytes in allocated(torch.clone, cache)


def test_a_compiled_step_allocates_the_same_whatever_the_size_of_its_caches() -> None:
    compiled = torch.compile(layer, backend="tcport", fullgraph=True, dynamic=True)
    args = step().tensors()
    small, large = halves(4096), halves(16 * 4096)
    assert large[0].nbytes == 16 * 2**20
    compiled(*small, *args)
    compiled(*large, *args)
    few, many = allocated(compiled, *small, *args), allocated(compiled, *large, *args)
    assert few == many
    assert 0 < sum(many) < 2**20
