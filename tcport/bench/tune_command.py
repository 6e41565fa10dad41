"""``python -m tcport tune``: measure, keep what is faster, and share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tcport.bench.cases import Case, parse_case
from tcport.bench.tune import Tuning, shapes
from tcport.errors import ArgumentError, TcportError
from tcport.lowering.registry import touch
from tcport.tiling import tuned


def tune(
    case: Annotated[
        list[str] | None, typer.Option(help="As bench takes it; cases of one shape are tuned together.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="For the tiles of each shape; no tile is begun later.")] = 60,
    memory: Annotated[float, typer.Option(min=0.01, help="GB of KV caches at a time.")] = 2,
    export: Annotated[Path | None, typer.Option(help="Write this device's table here.")] = None,
    import_file: Annotated[Path | None, typer.Option("--import", help="Take a table that was exported.")] = None,
) -> None:
    """Time the tiles of shapes of call on this machine's GPU, and let the chain take those that beat the model's."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        if not (case or export or import_file):
            raise ArgumentError("There is nothing to do.", "Give --case 'h32-8 d128 b64 c8192', --import or --export.")
        if import_file:
            path = tuned.store(_read(import_file))
            console.print(f"{escape(str(import_file))} is kept as {escape(str(path))}")
            touch()
        groups = shapes([parse_case(text) for text in case or []])
        if groups or export:
            _tune(console, groups, seconds, memory * 1e9, export)
    except TcportError as error:
        console.print(escape(str(error)), style="red")
        raise typer.Exit(1) from error


def _tune(console: Console, groups: list[list[Case]], seconds: float, memory: float, export: Path | None) -> None:
    import torch

    from tcport.bench.tune import tune as tune_shape
    from tcport.device import device_profile

    if not torch.cuda.is_available():
        raise ArgumentError("There is no GPU to measure.", "Run it where the model runs, or --import its table.")
    profile = device_profile("cuda")
    tunings: list[Tuning] = []
    identity = tuned.identity_of(profile)
    for cases in groups:
        with console.status(escape("; ".join(each.name for each in cases))):
            tunings.append(tune_shape(cases, profile, seconds=seconds, memory=memory))
    if tunings:
        console.print(_drawn(tunings))
        if tuned.identity_of(profile) != identity:
            raise ArgumentError("The power limit changed while tiles were timed.", "Keep it fixed and tune again.")
        promoted = [each.promoted for each in tunings if each.promoted is not None]
        table = tuned.stored(identity).with_entries(promoted, [each.facts for each in tunings])
        console.print(f"{len(promoted)} of {len(tunings)} kept in {escape(str(tuned.store(table)))}")
        touch()
    if export:
        try:
            export.write_text(json.dumps(tuned.stored(identity).to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{export} cannot be written: {error.strerror}.", "Name another file.") from error


def _drawn(tunings: list[Tuning]) -> Table:
    table = Table("shape", "tiles", "the model's", "fastest", "gain", "taken")
    for each in tunings:
        names = escape("; ".join(case.name for case in each.cases))
        tried = f"{each.tried}" + (f", {len(each.refused)} refused" if each.refused else "")
        tiles = str(each.model.uncut.config), str(each.best.uncut.config)
        verdict = "yes" if each.promoted else "no: less than 2%"
        table.add_row(names, tried + ("" if each.all_tried else ", time is up"), *tiles, f"{each.gain:.3f}", verdict)
    return table


def _read(path: Path) -> tuned.Table:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}.", "Name an exported table.") from error
    except ValueError as error:
        raise ArgumentError(f"{path} is no table of measured tiles: {error}.", "Export it again.") from error
    return tuned.table_from(data, str(path))
