"""What a compile costs: how many there are, and whether they copy a cache."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tcport import history
from tcport.report import CompileReport


@functools.total_ordering
@dataclasses.dataclass
class CompileCount:
    """Compiles of ``backend="tcport"`` within a ``with`` block, counted while it runs: compared like a number.

    Attributes:
        report: what each of them did.
    """

    report: CompileReport

    def __int__(self) -> int:
        return len(self.report.graphs)

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __le__(self, other: int) -> bool:
        return int(self) <= other

    def __repr__(self) -> str:
        return f"{int(self)} compile{'' if self == 1 else 's'}"

    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """Count the graphs that ``backend="tcport"`` compiles; compare the result with a number."""
    with history.collected() as report:
        yield CompileCount(report)


def assert_no_clone(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CompileReport:
    """Compile ``fn``, run it once, and fail if the generated code makes a buffer by copying a cache.

    A cache is what a tcport operator reads or writes, and what that is a view of.

    Raises:
        AssertionError: names the buffers, their sizes and the operations behind them.
    """
    from tcport.explainer import explain

    report = explain(fn, *args, explain_options=options, explain_dynamic=dynamic, **kwargs)
    if report.clones:
        copies = "; ".join(f"{c.buffer} of {c.bytes} bytes from {c.origin}" for c in report.clones)
        raise AssertionError(f"the compiled code copies a cache: {copies}")
    return report
