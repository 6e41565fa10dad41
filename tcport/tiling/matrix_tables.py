"""What a matrix found, as tables: a line that counts, a table by groups, what needs a reader's eye, and every cell."""

from __future__ import annotations

import collections
import csv
import io
from collections.abc import Sequence

from tcport.tiling.matrix import Cell, Outcome


def counts(todo: Sequence[Cell], outcomes: Sequence[Outcome]) -> str:
    """One line: what came of the cells."""
    fitting = [outcome for outcome in outcomes if not outcome.refusal]
    spilling = [outcome for outcome in fitting if outcome.spill]
    numbers = {
        "compiled": len(fitting),
        "over a limit": sum(outcome.over_limit for outcome in fitting),
        "spilling with no tile that might not": sum(outcome.exhausted for outcome in spilling),
        "spilling with tiles untried": sum(not outcome.exhausted for outcome in spilling),
        "refused": len(outcomes) - len(fitting),
        "not compiled": len(todo) - len(outcomes),
    }
    return f"{len(todo)} cells: " + ", ".join(f"{number} {what}" for what, number in numbers.items())


def summary(todo: Sequence[Cell], outcomes: Sequence[Outcome]) -> str:
    """Markdown: the counts, a row for each target, kernel and dtype, then refusals, spills and what was left."""
    groups: dict[tuple[str, str, str], list[Outcome]] = collections.defaultdict(list)
    for outcome in sorted(outcomes, key=lambda outcome: _order(outcome.cell)):
        groups[outcome.cell.target, outcome.cell.kernel, outcome.cell.dtype].append(outcome)
    lines = [
        counts(todo, outcomes),
        "",
        "| target | kernel | dtype | cells | largest shared memory of its limit | most registers | spilling | refused "
        "| fewest CTAs a unit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (target, kernel, dtype), group in groups.items():
        fitting = [outcome for outcome in group if not outcome.refusal]
        most = max(fitting, key=lambda outcome: outcome.shared / outcome.shared_limit, default=None)
        numbers = (
            f"{most.shared} of {most.shared_limit}" if most else "-",
            max((outcome.registers for outcome in fitting), default="-"),
            sum(outcome.spill > 0 for outcome in fitting),
            len(group) - len(fitting),
            min((outcome.occupancy for outcome in fitting), default="-"),
        )
        lines.append(f"| {target} | {kernel} | {dtype} | {len(group)} | {' | '.join(map(str, numbers))} |")
    known = {outcome.cell for outcome in outcomes}
    every = [outcome for group in groups.values() for outcome in group]
    for title, chosen in (
        ("Refused", [f"{_place(o.cell)}: {o.refusal} `{o.instead}` takes it." for o in every if o.refusal]),
        ("Spilling", [f"{_place(o.cell)}: {_spill(o)}" for o in every if o.spill]),
        ("Not compiled", [_place(cell) for cell in sorted(todo, key=_order) if cell not in known]),
    ):
        if chosen:
            lines += ["", f"{title}:", "", *(f"- {line}" for line in chosen)]
    return "\n".join(lines) + "\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """Comma-separated values: a row for each cell, with the steps before its tile counted."""
    text = io.StringIO()
    rows = [outcome.to_dict() | {"steps": len(outcome.steps)} for outcome in outcomes]
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _spill(outcome: Outcome) -> str:
    tried = len(outcome.steps) + 1
    rest = "none is left that might not" if outcome.exhausted else "others were not tried"
    return f"{outcome.tile}, {outcome.spill} bytes of a thread, the least of {tried} tiles tried; {rest}"


def _place(cell: Cell) -> str:
    return f"{cell.target} {cell.kernel} {cell.dtype} D {cell.dim} page {cell.page}"


def _order(cell: Cell) -> tuple[str, str, str, int, int]:
    return cell.target, cell.kernel, cell.dtype, cell.dim, cell.page
