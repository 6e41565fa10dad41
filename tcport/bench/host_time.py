"""Host time of a call: ``python -m tcport.bench.host_time``.

A row is a graph, called eagerly, compiled, and as Inductor's generated code alone. What compiled code takes beyond that
are Dynamo's guards and AOTAutograd's wrappers, which the row of a plain graph, compiled by Inductor as it is, has as
well. Times are medians over calls that are put into the queue of an idle device, one at a time; on a CPU they hold the
work itself, so its sizes are small.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import os
import pstats
import re
from collections.abc import Callable
from typing import Any

import torch

from tcport import eager, history, ops  # noqa: F401  (eager binds the operators)
from tcport._inductor.calls import generated_code
from tcport.bench.timing import host_microseconds
from tcport.device import device_profile
from tcport.fingerprint import triton_version

Graph = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """Microseconds of the host for one call.

    Attributes:
        eager: of the operators. compiled: of the whole compiled call. generated: of Inductor's code within it.
        launches: Triton kernels in that code. operators: calls of operators in it.
    """

    name: str
    eager: float
    compiled: float
    generated: float
    launches: int
    operators: int

    def __str__(self) -> str:
        times = "".join(f"{time:10.1f}" for time in (self.eager, self.compiled, self.generated))
        return f"{self.name:34}{times}{self.launches:10}{self.operators:10}"


def attend(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    return ops.paged_attention(q, kc, vc, table, lens, bounds)


def write_and_attend(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    ops.kv_write(k, v, kc, vc, slots)
    return ops.paged_attention(q, kc, vc, table, lens, bounds)


def eight_layers(q: Any, *rest: Any) -> Any:
    for _ in range(8):
        q = write_and_attend(q, *rest)
    return q


def plain(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    """One kernel that takes the same number of tensors as :func:`attend`."""
    return q + kc[0, 0, 0] + vc[0, 0, 0] + table[0, 0] + lens[0]


def plain_write(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    """As :func:`write_and_attend`: it writes to both caches."""
    kc[0, 0] = k[0] + slots[0]
    vc[0, 0] = v[0]
    return q + table[0, 0] + lens[0]


GRAPHS: dict[str, tuple[Graph, str, int | None]] = {
    "attention": (attend, "tcport", None),
    "write and attention": (write_and_attend, "tcport", None),
    "8 times write and attention": (eight_layers, "tcport", None),
    "attention of a prompt": (attend, "tcport", 64),
    "plain graph": (plain, "inductor", None),
    "plain graph that writes": (plain_write, "inductor", None),
}
"""By name: the function, the backend that compiles it, and the query tokens of a sequence; None: one, by decode."""
KNOWN = ("attention", "plain graph")
"""Those that are compiled for known sizes as well."""


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    options.add_argument("--calls", type=int, default=300, help="calls that a median is taken of")
    options.add_argument("--graph", nargs="+", default=list(GRAPHS), choices=list(GRAPHS), help="default: all")
    options.add_argument("--profile", type=int, default=0, metavar="N", help="print the N functions that take longest")
    given = options.parse_args()
    device = device_profile(given.device).name
    print(f"{device}, {os.cpu_count()} CPUs, torch {torch.__version__}, triton {triton_version()}; microseconds")
    heads = ("eager", "compiled", "generated", "launches", "operators")
    print(f"{'graph':34}" + "".join(f"{head:>10}" for head in heads))
    with torch.no_grad():
        for name in given.graph:
            for dynamic in (False, True) if name in KNOWN else (True,):
                print(measure(name, given.device, dynamic, given.calls, given.profile), flush=True)


def measure(name: str, device: str, dynamic: bool, calls: int, functions: int = 0) -> Row:
    """Time one graph.

    Args:
        dynamic: compile it for sizes that are open.
        functions: print as many functions of a compiled call, by the time they take themselves.
    """
    graph, backend, tokens = GRAPHS[name]
    args = inputs(device, tokens)
    torch.compiler.reset()
    # A graph from the cache does not show its code.
    anew: dict[str, Any] | None = {"force_disable_caches": True} if backend == "tcport" else None
    compiled = torch.compile(graph, backend=backend, fullgraph=True, dynamic=dynamic, options=anew)
    torch.testing.assert_close(compiled(*args), graph(*args), rtol=2e-2, atol=2e-2)
    runs = (lambda: graph(*args), lambda: compiled(*args), generated_code(compiled, *args))
    eagerly, whole, alone = (host_microseconds(run, calls, _waiting(device)) for run in runs)
    if functions:
        _print_profile(runs[1], calls, functions, _waiting(device))
    report = history.last_report()
    source = report.graphs[-1].source if report and backend == "tcport" else ""
    launches, operators = (len(re.findall(pattern, source)) for pattern in (r"\.run\(", r"torch\.ops\.[\w.]+\("))
    return Row(f"{name}, {'open' if dynamic else 'known'} sizes", eagerly, whole, alone, launches, operators)


def inputs(device: str, tokens: int | None) -> list[Any]:
    """Query, key, value, caches, slots, block table, lengths and query bounds: of an 8B model, on a CPU of a toy."""
    batch, width, heads, kv_heads, dim, page = (8, 32, 32, 8, 128, 16) if device == "cuda" else (4, 4, 8, 2, 32, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    total = batch * (tokens or 1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    table = torch.arange(batch * width, device=device).view(batch, width).int()
    lens = torch.full((batch,), width * page - 1, device=device).int()
    slots = torch.arange(total, device=device)
    bounds = None if tokens is None else (torch.arange(batch + 1, device=device) * tokens).int()
    caches = (random(batch * width, page, kv_heads, dim) for _ in "kv")
    new = (random(total, count, dim) for count in (heads, kv_heads, kv_heads))
    return [*new, *caches, slots, table, lens, bounds]


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
