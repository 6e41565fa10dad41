"""``python -m tcport sweep``: every legal tile of each shape on this machine's GPUs, a file for each shape."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tcport.bench.cases import parse_case
from tcport.bench.command import environment
from tcport.bench.sweep import Sweep, geometric_mean
from tcport.errors import ArgumentError, TcportError


def sweep(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for a file of each shape; kept ones stay.")],
    case: Annotated[list[str] | None, typer.Option(help="A case as bench takes it; default: all shapes.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile; default: a core each.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs that time; default: all that are visible.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="No shape is begun after this time.")] = 86400,
    confirm: Annotated[
        Path | None, typer.Option(help="Folder of an earlier sweep: time today's first choices beside its best alone.")
    ] = None,
) -> None:
    """Time every legal tile of each shape, and say how far the optimizer's first choice is from the best."""
    from tcport.bench import sweep_run
    from tcport.bench.shapes import SHAPES
    from tcport.device import device_profile

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    start = time.monotonic()

    def told(job: sweep_run.Job, outcome: Sweep | str) -> None:
        said = outcome if isinstance(outcome, str) else f"{len(outcome.timings)} tiles, ratio {outcome.ratio:.3f}"
        console.print(f"{time.monotonic() - start:6.1f} s  {escape(job.case.name)}: {escape(said)}")

    try:
        shapes = [parse_case(text) for text in case or []] or list(SHAPES)
        if not torch.cuda.is_available():
            raise ArgumentError("There is no CUDA GPU to measure.", "`python -m tcport plan` shows the model's choice.")
        profile, count = device_profile("cuda"), gpus or torch.cuda.device_count()
        out.mkdir(parents=True, exist_ok=True)
        if confirm is None:
            todo = sweep_run.jobs_for(shapes, profile, out)
        else:
            known = [each for each in sweep_run.read(confirm) if not case or each.case in shapes]
            todo = sweep_run.jobs_to_confirm(known, profile, out)
        (out / "environment.txt").write_text(json.dumps(environment(), indent=1) + "\n", encoding="utf-8")
        compilers = jobs or max(1, (os.cpu_count() or 1) - count)
        kernels = {key for job in todo for key in job.kernels()}
        tiles = sum(len(job.tiles) for job in todo)
        console.print(f"{len(todo)} shapes, {tiles} tiles, {len(kernels)} kernels; {compilers} compilers, {count} GPUs")
        target = sweep_run.target_of(profile)
        sweep_run.run(todo, compilers, range(count), target, seconds=seconds, told=told)
        sweeps = sweep_run.read(out)
    except TcportError as error:
        console.print(escape(str(error)), style="red")
        raise typer.Exit(1) from error
    missing = len({job.file for job in todo} - {out / sweep_run.file_name(each.case) for each in sweeps})
    summary(console, sweeps)
    console.print(f"{time.monotonic() - start:.0f} s; {missing} shapes are missing")
    raise typer.Exit(1 if missing or any(each.wrong for each in sweeps) else 0)


def summary(console: Console, sweeps: list[Sweep]) -> None:
    """A row for each shape, then the figures that the cost model is held to, and tiles that were wrong."""
    table = Table("shape", "tiles", "first us", "best us", "ratio", "first", "best")
    for each in sweeps:
        first, best = each.first, each.best
        numbers = (f"{first.microseconds:.1f}", f"{best.microseconds:.1f}", f"{each.ratio:.3f}")
        table.add_row(escape(each.case.name), str(len(each.timings)), *numbers, str(first.tile), str(best.tile))
    console.print(table)
    if sweeps:
        console.print(f"geometric mean {geometric_mean(sweeps):.3f}, worst {max(each.ratio for each in sweeps):.3f}")
    for each in sweeps:
        for tile, why in each.wrong:
            console.print(f"WRONG: {escape(each.case.name)}, {tile}: {escape(why)}")
