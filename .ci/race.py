"""Race source trees of tcport on a CUDA GPU: ``.ci/race.py main HEAD --seconds 60 --case 1x512 --case 8x2048``.

A tree is a revision of git, or the path of a folder (``.`` is the working tree with all its changes). Each has a
process and compiler caches of its own, builds every case and is checked against fp32 (``race_worker.py``). Then CUDA
graphs are replayed in short bursts, one process at a time, in an order that every round draws anew: what changes with
time, such as a clock that falls as the GPU warms up, meets all trees alike. The first tree runs twice; how far its two
times differ is what the race cannot tell apart.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from race_processes import Summary, Worker, build, race, summary
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tcport.bench.cases import SUITES, Case, parse_case  # noqa: E402
from tcport.errors import ArgumentError, TcportError  # noqa: E402

SHORT = {
    "1x512": "h32-8 d128 b1 c512 q512",
    "1x4096": "h32-8 d128 b1 c4096 q4096",
    "8x2048": "h32-8 d128 b8 c2048 q2048",
    "chunk": "h32-8 d128 b1 c16384 q2048",
    "1x32768": "h32-8 d128 b1 c32768 q32768",
    "mixed": "64 decodes at 4096, chunk 2048 on 8192",
    "d64": "h32-8 d64 b1 c4096 q4096",
    "d256": "h32-8 d256 b1 c4096 q4096",
    "decode1x8192": "h32-8 d128 b1 c8192",
    "decode8x2048": "h32-8 d128 b8 c2048",
    "decode64x8192": "h32-8 d128 b64 c8192",
    "ragged64": "ragged 64, 32 to 32768",
}
"""Short names of cases of the bench."""
ALL = (*SHORT, "decode1x8192/33", "decode1x8192/64")
USUAL = ("1x512", "8x2048", "chunk", "decode1x8192", "decode64x8192")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A case of the race: one of the bench, with ``num_splits`` where that is not left to tcport."""

    case: Case
    num_splits: int | None = None

    @property
    def work(self) -> str:
        return f"{self.case.kv_bytes / 1e6:.1f} MB" if self._reads else f"{self.case.flops / 1e9:.1f} GFLOP"

    def rate(self, us: float) -> str:
        if self._reads:
            return f"{self.case.kv_bytes / us / 1e6:.2f} TB/s"
        return f"{self.case.flops / us / 1e6:.1f} TFLOP/s"

    @property
    def _reads(self) -> bool:
        return self.case.kind == "decode"


def main(
    trees: Annotated[list[str] | None, typer.Argument(help="Revisions or folders; the first is compared with.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time to race, from when all trees are built.")] = 60,
    case: Annotated[list[str] | None, typer.Option(help="One of --list, or as bench spells it; repeatable.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the times of every round here.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Invented times: tries everything that needs no GPU.")] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases; * marks those of a plain race.")] = False,
) -> None:
    """Race source trees of tcport, each built, checked against fp32 and timed in a process of its own."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if list_cases:
        for name in ALL:
            console.print(f"{'*' if name in USUAL else ' '} {name:16} {entry(name).case.name}", markup=False)
        return
    try:
        entries = {name: entry(name) for name in case or USUAL}
        check_arguments(trees or [], json_file, dry)
        with tempfile.TemporaryDirectory(prefix="race-", ignore_cleanup_errors=True) as folder:
            found = {text: tree(text, Path(folder, f"tree{number}")) for number, text in enumerate(trees or [])}
            result = raced(console, found, entries, seconds, Path(folder), dry)
    except TcportError as error:
        console.print(escape(str(error)), style="red")
        raise typer.Exit(1) from error
    if json_file:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if any(row["failed"] for row in result["cases"].values()):
        raise typer.Exit(1)


def entry(text: str) -> Entry:
    """The case of a name: a short one, the bench's or the bench's spelling, and ``/33`` for 33 splits."""
    name, slash, splits = text.partition("/")
    known = {each.name: each for cases in SUITES.values() for each in cases}
    try:
        found = known.get(SHORT.get(name, name)) or parse_case(name)
    except ArgumentError:
        found = None
    if not found or found.kind == "write" or (slash and not (splits.isdecimal() and int(splits))):
        raise ArgumentError(
            f"There is no case {text!r}.",
            f"Choose from {', '.join(ALL)}, or spell one as `tcport bench --case` takes it, but for writes.",
        )
    return Entry(found, int(splits) if slash else None)


def check_arguments(trees: Sequence[str], json_file: Path | None, dry: bool) -> None:
    """What must be right before anything is exported."""
    if len(trees) < 2:
        raise ArgumentError("A race takes two trees or more.", "Name revisions or folders, such as `main HEAD`.")
    if twice := [text for place, text in enumerate(trees) if text in trees[:place]]:
        raise ArgumentError(f"{twice[0]} is named twice.", "Name it once: the first tree is entered twice anyway.")
    if json_file and not json_file.absolute().parent.is_dir():
        raise ArgumentError(f"{json_file} cannot be written: its folder does not exist.", "Create the folder first.")
    if not dry:
        import torch

        if not torch.cuda.is_available():
            raise ArgumentError("A race needs a CUDA GPU.", "--dry tries the plumbing, with invented times.")


@dataclasses.dataclass(frozen=True)
class Tree:
    """Where a tree lies, and what it is: a commit, or the path of a folder."""

    path: Path
    source: str


def tree(text: str, target: Path, repository: Path = ROOT) -> Tree:
    """The tree of a revision, exported into ``target``, or else a folder as it is."""
    if commit := commit_of(text, repository):
        target.mkdir()
        archive = subprocess.run(["git", "-C", str(repository), "archive", commit], check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
        found = Tree(target, commit)
    else:
        found = Tree(Path(text).resolve(), str(Path(text).resolve()))
        if not found.path.is_dir():
            raise ArgumentError(f"{text!r} is no revision of {repository} and no folder.", "Name one of these.")
    if not (found.path / "tcport" / "__init__.py").is_file():
        raise ArgumentError(f"{text} holds no package tcport.", "Name a revision or a folder that has tcport/.")
    return found


def commit_of(text: str, repository: Path) -> str | None:
    """The commit of a revision; None where git knows no such revision, or there is no git."""
    command = ["git", "-C", str(repository), "rev-parse", "--verify", "--quiet", "--end-of-options", text + "^{commit}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except FileNotFoundError:
        return None


def raced(
    console: Console, trees: dict[str, Tree], entries: dict[str, Entry], seconds: float, folder: Path, dry: bool
) -> dict[str, Any]:
    """Build, race and print; everything that was measured."""
    first, *others = trees
    again = f"{first} again"
    began = time.monotonic()
    workers: list[Worker] = []
    try:
        for label, name in ((first, first), *((other, other) for other in others), (again, first)):
            workers.append(Worker(label, trees[name].path, folder / f"home{list(trees).index(name)}", dry))
        with console.status("building"):
            cases = {name: (dataclasses.asdict(each.case), each.num_splits) for name, each in entries.items()}
            answers = build(workers, cases)
        about = {label: of["start"] for label, of in answers.items()}
        console.print(", ".join(f"{name} {value}" for name, value in about[first].items()), markup=False)
        console.print(f"built after {time.monotonic() - began:.0f} s; racing for {seconds:g} s", markup=False)
        with console.status("racing"):
            rounds = race(workers, entries, seconds, random.Random(0))
    finally:
        for worker in workers:
            worker.end()
    rows: dict[str, Any] = {}
    for name, each in entries.items():
        summaries = {worker.label: summary(rounds[name], worker.label, first) for worker in workers}
        failed = {worker.label: worker.failed[name] for worker in workers if name in worker.failed}
        show(console, name, each, summaries, failed, {label: of[name].get("remark") for label, of in answers.items()})
        rows[name] = {
            "case": each.case.name,
            "num_splits": each.num_splits,
            "trees": {label: dataclasses.asdict(found) for label, found in summaries.items() if found},
            "errors": {label: of[name].get("error") for label, of in answers.items()},
            "failed": failed,
            "rounds": rounds[name],
        }
    return {"trees": {label: found.source for label, found in trees.items()}, "about": about, "cases": rows}


def show(
    console: Console,
    name: str,
    each: Entry,
    summaries: dict[str, Summary | None],
    failed: dict[str, str],
    remarks: dict[str, str | None],
) -> None:
    """A case's table, and below it why trees are missing or may be slow."""
    title = escape(f"{name}: {each.case.name}, {each.work}")
    table = Table("tree", title=title, title_justify="left", title_style="bold")
    for column in ("us", "quartiles", "/ first", "paired", "rate", "rounds"):
        table.add_column(column, justify="right")
    for label, found in summaries.items():
        if found:
            low, high = found.quartiles
            ratios = ("" if ratio is None else f"{ratio:.4f}" for ratio in (found.ratio, found.paired))
            numbers = (f"{found.us:.2f}", f"{low:.2f} .. {high:.2f}", *ratios, each.rate(found.us), str(found.rounds))
            table.add_row(escape(label), *numbers)
    console.print(table)
    for label, reason in failed.items():
        console.print(escape(f"{label} is left out: {' '.join(reason.split())}"), style="red")
    for label, remark in remarks.items():
        if remark:
            console.print(escape(f"{label} fell back: {remark}"), style="yellow")


if __name__ == "__main__":
    typer.run(main)
