"""``python -m tcport bench``: time over bound and over peers, case by case, as a table, JSON and a picture."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tcport.bench.cases import SUITES, Case, parse_case
from tcport.errors import ArgumentError, TcportError

FUSIONS = "fusions"
"""The suite that is no set of attention calls, see :mod:`tcport.bench.fusions`."""


def bench(
    suite: Annotated[str, typer.Option(help=f"{', '.join(SUITES)}, all of these, fusions, or none.")] = "all",
    case: Annotated[list[str] | None, typer.Option(help="Such as 'h32-8 d128 b64 c8192 p16'; repeatable.")] = None,
    peers: Annotated[str, typer.Option(help="Names separated by commas; all, or none.")] = "all",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time over bound into this .png or .svg.")] = None,
) -> None:
    """Time the kernels on this machine's CUDA GPU, beside a kernel that only reads the pages and beside peers."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    try:
        cases = chosen_cases(suite, case or []) if suite != FUSIONS else _no_cases(case, plot)
        named = chosen_peers(peers)
        _check_files(json_file, plot)
        _need_gpu()
        rows = _measured_fusions(console) if suite == FUSIONS else _measured(console, cases, named)
    except TcportError as error:
        console.print(escape(str(error)), style="red")
        raise typer.Exit(1) from error
    if json_file:
        json_file.write_text(json.dumps({**environment(), "rows": rows}, indent=2) + "\n", encoding="utf-8")
    if plot:
        draw(rows, plot)
    if any("wrong" in row for row in rows):
        raise typer.Exit(1)


def chosen_cases(suite: str, spelt: list[str]) -> list[Case]:
    """The cases of a suite, then those spelt out; spelt cases alone need ``--suite none``, or no suite beside them."""
    if suite not in (*SUITES, "all", "none"):
        raise ArgumentError(f"There is no suite {suite!r}.", f"Choose from {', '.join(SUITES)}, all, {FUSIONS}, none.")
    own = [parse_case(text) for text in spelt]
    if suite == "none" or (suite == "all" and own):
        return own
    names = SUITES if suite == "all" else [suite]
    return [*(case for name in names for case in SUITES[name]), *own]


def chosen_peers(text: str) -> list[str]:
    """Names of peers."""
    from tcport.bench.peers import PEERS

    names = list(PEERS) if text == "all" else [] if text == "none" else [name.strip() for name in text.split(",")]
    if text != "all" and (unknown := [name for name in names if name not in PEERS]):
        raise ArgumentError(f"There is no peer {unknown[0]!r}.", f"Choose from {', '.join(PEERS)}, or all, none.")
    return names


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    import triton

    from tcport.device import device_profile

    profile = device_profile("cuda")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": profile.name,
        "arch": profile.arch,
        "driver": profile.driver_version,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of time over bound, ours and each peer's."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    figure = Figure(figsize=(9, 1 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for place, name in enumerate(names):
        bars = [(y, row["times"][name] / row["bound"]) for y, row in enumerate(rows) if name in row["times"]]
        axes.barh([y + (place + 0.5) * height - 0.4 for y, _ in bars], [x for _, x in bars], height, label=name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time / time of a kernel that only moves the case's bytes")
    axes.legend()
    figure.savefig(path)


def _measured(console: Console, cases: list[Case], peers: list[str]) -> list[dict[str, Any]]:
    from tcport.bench.run import OURS, measure

    table = Table("case", "KV MB", "bound us", "tcport us", "/ bound", "TFLOP/s", "host us", "error", "peers")
    rows = []
    for case in cases:
        with console.status(escape(case.name)):
            row = measure(case, peers)
        beside = [f"{name} {time / row.times[OURS]:.2f}x" for name, time in row.times.items() if name != OURS]
        table.add_row(
            escape(case.name),
            f"{case.kv_bytes / 1e6:.0f}",
            f"{row.bound:.1f}",
            f"{row.times[OURS]:.1f}",
            f"{row.times[OURS] / row.bound:.2f}",
            "" if case.kind == "write" else f"{row.tflops:.0f}",
            f"{row.host:.0f}",
            f"{row.error:.1e}",
            escape(", ".join(beside)),
        )
        rows.append(row.to_dict())
    console.print(table)
    return rows


def _no_cases(case: list[str] | None, plot: Path | None) -> list[Case]:
    if case or plot:
        raise ArgumentError(
            "The suite 'fusions' takes no --case and no --plot.", "Measure attention in a run of its own."
        )
    return []


def _measured_fusions(console: Console) -> list[dict[str, Any]]:
    from tcport.bench.accuracy import WrongResultError
    from tcport.bench.fusion_cases import fusions
    from tcport.bench.fusions import OURS, measure_fusion

    table = Table("fusion", "tcport us", "GB/s", "error", "their time over ours (goal)")
    rows: list[dict[str, Any]] = []
    try:
        for fusion in fusions():
            try:
                with console.status(escape(fusion.name)):
                    row = measure_fusion(fusion)
            except WrongResultError as error:
                table.add_row(escape(fusion.name), "", "", "", escape(str(error)), style="red")
                rows.append({"name": fusion.name, "wrong": str(error)})
                continue
            beside = [
                f"{name} {ratio:.2f}x" + (f" ({row.goals[name]:g})" if name in row.goals else "")
                for name, ratio in row.ratios.items()
            ]
            time = row.times[OURS]
            numbers = (f"{time:.1f}", f"{row.moved / time / 1e3:.0f}", f"{row.error:.1e}")
            table.add_row(fusion.name, *numbers, escape(", ".join(beside)), style="yellow" if row.missed else None)
            rows.append(row.to_dict())
    finally:
        console.print(table)  # what was measured, also where something ends the run
    return rows


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise ArgumentError(
            "There is no CUDA GPU to measure.", "For the CPU's kernels run `python -m tcport.bench.cpu`."
        )


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    for path in (json_file, plot):
        if path and not path.absolute().parent.is_dir():
            raise ArgumentError(f"{path} cannot be written: its folder does not exist.", "Create the folder first.")
    if plot and plot.suffix not in (".png", ".svg"):
        raise ArgumentError(f"{plot} is no picture.", "Name a .png or .svg file.")
    if plot:
        try:
            import matplotlib as matplotlib
        except ImportError as error:
            raise ArgumentError("--plot needs matplotlib.", "Run `pip install tcport[bench]`.") from error
