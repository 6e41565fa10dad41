"""Decoded tokens per second of eager PyTorch, Inductor and tcport, over batch sizes and context lengths.

    python examples/throughput.py
    python examples/throughput.py --layers 4 --batch 1 --context 64 --context 4096

The model is that of generate.py, with attention in plain PyTorch; keys, values and tokens are random. The backends take
turns at every step, so that other work on the machine meets each of them alike; rates come from median times.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tcport
from attention import SPELLINGS
from compare import compiled
from display import compiling, loading
from generate import AttentionChoice, DtypeChoice, LayoutChoice, open_model, pick_device, pick_dtype
from kv_pool import PagePool, new_caches
from llama import Layer, Llama
from weights import load_llama

BACKENDS = ("eager", "inductor", "tcport")


def main(
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences decoded together.")] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Keys of each sequence.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Only this many of the model's layers.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 7,
    attention: Annotated[AttentionChoice, typer.Option(help="As in generate.py.")] = AttentionChoice.torch,
    device: Annotated[str, typer.Option(help="As in generate.py.")] = "auto",
    dtype: Annotated[DtypeChoice, typer.Option(help="As in generate.py.")] = DtypeChoice.auto,
    layout: Annotated[LayoutChoice, typer.Option(help="How a page lies in memory.")] = LayoutChoice.head_major,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 16,
) -> None:
    """Measure one decode step of a small Llama under each backend."""
    console = Console()
    batches, contexts = batch or [1, 8], context or [64, 4096]
    target = pick_device(device)
    file = open_model(None)
    with loading(console, f"Loading {file.path.name}") as on_weight:
        model = load_llama(file, target, pick_dtype(dtype, target), on_weight)
    model.layers = nn.ModuleList(list(model.layers)[:layers])
    model.attention = SPELLINGS[attention.value]
    attach_caches(model, max(batches) * max(contexts), len(batches) * len(contexts), page_size, layout)

    table = Table(title=f"decoded tokens per second, {target}, {len(model.layers)} layers, load {load()}")
    for name in ("batch", "context", *BACKENDS, "tokens as eager"):
        table.add_column(name, justify="right")
    steps = {name: compiled(model.decode, name) for name in BACKENDS}
    kernels: Counter[str] = Counter()
    with torch.no_grad(), compiling(console, "all") as running:
        for rows in batches:
            for keys in contexts:
                arguments = step_arguments(model, rows, keys)
                with running(f"batch {rows}, context {keys}"):
                    results = {name: step(*arguments) for name, step in steps.items()}
                    kernels.update(kernels_of_last_report())
                    times = medians(steps, arguments, rounds)
                rates = [f"{rows / times[name]:,.1f}" for name in BACKENDS]
                same = all(torch.equal(results["eager"], result) for result in results.values())
                table.add_row(str(rows), str(keys), *rates, "all" if same else "no")
    console.print(table)
    console.print("tcport ran " + ", ".join(sorted(kernels)), highlight=False, markup=False)


def attach_caches(model: Llama, num_tokens: int, cases: int, page_size: int, layout: LayoutChoice) -> None:
    """Caches with random keys and values, and room for the longest batch."""
    config, weight = model.config, model.embedding.weight
    pages = 1 + num_tokens // page_size + cases * 8
    caches = new_caches(
        len(model.layers), pages, page_size, config.num_kv_heads, config.head_dim,
        layout=layout.value, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    for cache in (cache for pair in caches for cache in pair):
        cache.normal_()
    model.attach_caches(caches)


def step_arguments(model: Llama, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and block table of ``rows`` sequences whose newest token is their ``keys``-th."""
    device, page_size = model.embedding.weight.device, model.page_size
    pool = PagePool(cast("Layer", model.layers[0]).attention.k_cache.shape[0], page_size)
    width = pool.pages_for(keys)
    pages = torch.tensor(pool.allocate(rows * width), dtype=torch.int32)
    table = pages[torch.randperm(len(pages))].view(rows, width).to(device)
    tokens = torch.randint(model.config.vocab_size, (rows,), device=device)
    return tokens, torch.full((rows,), keys - 1, device=device), table


def medians(steps: dict[str, Callable[..., Tensor]], arguments: tuple[Tensor, ...], rounds: int) -> dict[str, float]:
    """Seconds of each step, the median over rounds in which every step had its turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*arguments).tolist()  # waits for the device
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def kernels_of_last_report() -> list[str]:
    """The kernels that tcport chose in its newest compile, which may come out of a cache."""
    report = tcport.last_report()
    return [f"{node.kernel} [{node.tier}] for {node.op}" for node in report.nodes] if report else []


def load() -> str:
    """Processes that wanted to run in the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    typer.run(main)
