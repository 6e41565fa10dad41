"""What the example shows: progress bars, text as it is generated, the figures at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from compare import Result


@contextmanager
def loading(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is told ``(done, total)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def compiling(console: Console, backend: str) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """``with running("decode"): ...`` shows a bar while a step is compiled; off a terminal, a line before and after."""
    verb = "warming up" if backend == "eager" else "compiling"
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:

        @contextmanager
        def running(step: str) -> Iterator[None]:
            if not console.is_terminal:
                console.print(f"{backend}: {verb} {step} ...", highlight=False)
            task = progress.add_task(f"{backend}: {verb} {step}", total=None)
            yield
            progress.update(task, total=1, completed=1)

        yield running


class Transcript:
    """Prompts and answers: as they grow on a terminal, when all are complete elsewhere."""

    def __init__(
        self, console: Console, title: str, prompts: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._console = console
        self._title = title
        self._prompts = prompts
        self._decode = decode
        self._generated: list[list[int]] = [[] for _ in prompts]
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8, transient=False)

    def __enter__(self) -> Transcript:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"{self._title}: generating ...", highlight=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._console.print(self._table())

    def add(self, index: int, token: int) -> None:
        """One more token of the answer to prompt ``index``."""
        self._generated[index].append(token)

    def _table(self) -> Table:
        table = Table(title=self._title, show_lines=True, expand=True)
        table.add_column("prompt", ratio=1)
        table.add_column("answer", ratio=2)
        for prompt, ids in zip(self._prompts, self._generated, strict=True):
            table.add_row(Text(prompt), Text(self._decode(ids)))
        return table


def show_summary(console: Console, results: Sequence[Result]) -> None:
    """Tokens per second and compilations of each backend, and whether all of them gave the same tokens."""
    table = Table(title="tokens per second")
    table.add_column("backend")
    for name in (
        "prefill",
        "decode",
        "compilations (prefill + decode)",
        "compile seconds",
        f"tokens as {results[0].backend}",
    ):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.backend,
            f"{result.throughput.prefill_rate:,.1f}",
            f"{result.throughput.decode_rate:,.1f}",
            " + ".join(map(str, result.compilations.values())),
            f"{result.compile_seconds:.1f}",
            agreement(result.generated, results[0].generated),
        )
    console.print(table)


def agreement(generated: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """``all``, or at which token the first answer to differ does so."""
    for number, (ours, theirs) in enumerate(zip(generated, expected, strict=True), start=1):
        if list(ours) != list(theirs):
            pairs = zip(ours, theirs, strict=False)
            token = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            return f"answer {number} differs from token {token + 1}"
    return "all"
