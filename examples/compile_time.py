"""How long Inductor and tcport take to compile the two steps of the model of generate.py, with empty caches of graphs.

    python examples/compile_time.py
    python examples/compile_time.py --layers 4 --rounds 1

Each compile has a process and cache folders of its own, and the backends take turns. CPU seconds, of the process and
the compilers that it started, say more than the clock does where other work runs on the machine. tcport's C++ kernels
are built once for a machine, and do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from attention import SPELLINGS
from compare import compiled
from display import compiling
from generate import AttentionChoice, open_model, pick_device
from kv_pool import new_caches
from llama import Llama
from tcport.errors import TcportError
from tcport.kernels import cpu_library

BACKENDS = ("inductor", "tcport")
GOAL = 1.10
"""What tcport may take of Inductor's time."""
BATCH, TABLE_WIDTH, PAGE_SIZE, PROMPT = 4, 8, 16, 20


def main(
    layers: Annotated[int | None, typer.Option(min=1, help="Only this many of the model's layers.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Compiles of each backend; the median counts.")] = 3,
    attention: Annotated[AttentionChoice, typer.Option(help="As in generate.py.")] = AttentionChoice.torch,
    device: Annotated[str, typer.Option(help="As in generate.py.")] = "auto",
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compile prefill and decode of a small Llama with random weights under both backends."""
    if worker:
        print(json.dumps(seconds_to_compile(worker, layers, attention, pick_device(device))))
        return
    console = Console()
    runs: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    options = ["--attention", attention.value, "--device", device, *(["--layers", str(layers)] if layers else [])]
    for number in range(1, rounds + 1):
        for backend, done in runs.items():
            with compiling(console, backend) as running, running(f"round {number} of {rounds}"):
                done.append(in_fresh_process(backend, options))
    medians = {
        backend: {what: statistics.median(run[what] for run in done) for what in done[0]}
        for backend, done in runs.items()
    }
    show(console, medians)


def show(console: Console, medians: dict[str, dict[str, float]]) -> None:
    """The seconds of both backends, and tcport's as a part of Inductor's."""
    table = Table("seconds", *BACKENDS, "tcport / Inductor")
    for what in medians[BACKENDS[0]]:
        inductor, ours = (medians[backend][what] for backend in BACKENDS)
        table.add_row(what, f"{inductor:.1f}", f"{ours:.1f}", f"{ours / inductor:.2f}")
    console.print(table)
    ratio = medians["tcport"]["CPU"] / medians["inductor"]["CPU"]
    console.print(f"CPU seconds: {ratio:.2f} of Inductor's, {'within' if ratio <= GOAL else 'beyond'} {GOAL:.2f}")


def in_fresh_process(backend: str, options: list[str]) -> dict[str, float]:
    """What :func:`seconds_to_compile` finds where nothing was compiled before."""
    with tempfile.TemporaryDirectory(prefix="tcport-compile-time-") as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
        }
        command = [sys.executable, __file__, "--worker", backend, *options]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds_to_compile(
    backend: str, layers: int | None, attention: AttentionChoice, device: torch.device
) -> dict[str, float]:
    """Seconds of both steps' first calls, by the clock and of all processors."""
    config = open_model(None).config()
    model = Llama(config).requires_grad_(False).eval().to(device)
    model.layers = nn.ModuleList(list(model.layers)[:layers])
    model.attention = SPELLINGS[attention.value]
    pages = 1 + BATCH * TABLE_WIDTH
    caches = new_caches(
        len(model.layers), pages, PAGE_SIZE, config.num_kv_heads, config.head_dim,
        layout="page-major", device=device, dtype=torch.float32,
    )  # fmt: skip
    model.attach_caches(caches)
    # What is done once for all graphs, or for the machine, does not count.
    compiled(torch.neg, backend)(torch.ones(4, device=device))
    if device.type == "cpu":
        with contextlib.suppress(TcportError):  # without a C++ compiler tcport attends in PyTorch, and compiles that
            cpu_library.load()
    clock, processors = time.perf_counter(), processor_seconds()
    with torch.no_grad():
        for name, arguments in sample_arguments(device).items():
            compiled(getattr(model, name), backend)(*arguments)
    return {"clock": time.perf_counter() - clock, "CPU": processor_seconds() - processors}


def sample_arguments(device: torch.device) -> dict[str, tuple[Tensor, ...]]:
    """Arguments of both steps; everything is written to the scratch page."""
    tokens, positions = (torch.zeros(BATCH, dtype=torch.int64, device=device) for _ in range(2))
    one, several = (torch.zeros(rows, TABLE_WIDTH, dtype=torch.int32, device=device) for rows in (1, BATCH))
    prompt = torch.zeros(1, PROMPT, dtype=torch.int64, device=device)
    return {"prefill": (prompt, one), "decode": (tokens, positions, several)}


def processor_seconds() -> float:
    """CPU seconds of this process, and of those it started that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    typer.run(main)
