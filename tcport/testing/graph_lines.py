"""``assert_graph``: what a graph must look like, in lines of the form that LLVM's FileCheck reads."""

from __future__ import annotations

import re
from typing import NoReturn

import torch.fx

from tcport.errors import ArgumentError

_DIRECTIVE = re.compile(r"^\s*(?:#|//)?\s*CHECK(-NEXT|-NOT|-COUNT-(\d+))?:\s?(.*?)\s*$")
_MISSPELT = re.compile(r"^\s*(?:#|//)?\s*(?:CHECK|(?i:check)[-_:])")
_DIRECTIVES = "Begin lines with 'CHECK:', 'CHECK-NEXT:', 'CHECK-NOT:' or 'CHECK-COUNT-<n>:'."


def assert_graph(graph: torch.fx.GraphModule | torch.fx.Graph, checks: str) -> None:
    """Fail unless the lines of a graph meet the checks, in order.

    Each line of ``checks`` is one of these; in a pattern, ``{{...}}`` holds a regular expression, ``[[NAME:regex]]``
    binds a name, and ``[[NAME]]`` is the text that was bound. Runs of blanks match runs of blanks.

    * ``CHECK: pattern``: some line after the last match.
    * ``CHECK-NEXT: pattern``: the line right after it.
    * ``CHECK-NOT: pattern``: no line between the matches around it.
    * ``CHECK-COUNT-3: pattern``: that many lines, in order.

    Args:
        graph: each of its nodes is a line, as ``torch.fx.Node.format_node`` prints it.
        checks: the text; lines that do not begin with ``CHECK`` or ``check-`` are comments.

    Raises:
        AssertionError: names the check that fails and shows the graph, with a mark where the search began.
        ArgumentError: ``graph`` is none, a directive is misspelt or holds no regular expression, or there is none.
    """
    lines = [line for node in graph_of(graph).nodes if (line := node.format_node()) is not None]
    directives = [match for line in checks.splitlines() if (match := _directive(line))]
    if not directives:
        raise ArgumentError("There is no directive in the checks.", _DIRECTIVES)
    at, bound, forbidden = 0, {}, []
    for directive in directives:
        kind, count, pattern = directive.groups()
        if kind == "-NOT":
            forbidden.append(pattern)
            continue
        for _ in range(int(count or 1)):
            reach = lines[at : at + 1] if kind == "-NEXT" else lines[at:]
            found = next((n for n, line in enumerate(reach) if _search(pattern, line, bound)), None)
            if found is None:
                _fail(f"CHECK{kind or ''}: {pattern}", "is not met", lines, at)
            _check_absent(forbidden, lines, at, at + found, bound)
            bound.update(_search(pattern, lines[at + found], bound).groupdict())  # type: ignore[union-attr]
            at, forbidden = at + found + 1, []
    _check_absent(forbidden, lines, at, len(lines), bound)


def graph_of(graph: torch.fx.GraphModule | torch.fx.Graph) -> torch.fx.Graph:
    """The graph of a module, or the graph itself.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(graph, torch.fx.GraphModule):
        return graph.graph
    if not isinstance(graph, torch.fx.Graph):
        raise ArgumentError(
            f"A graph is wanted, and a {type(graph).__name__} was given.", "Take one from capture(fn, *args)."
        )
    return graph


def _directive(line: str) -> re.Match[str] | None:
    directive = _DIRECTIVE.match(line)
    # A misspelt CHECK-NOT that passed for a comment would be a test that cannot fail.
    if directive is None and _MISSPELT.match(line):
        raise ArgumentError(f"The line {line.strip()!r} is no check.", _DIRECTIVES)
    return directive


def _check_absent(patterns: list[str], lines: list[str], start: int, stop: int, bound: dict[str, str]) -> None:
    for pattern in patterns:
        for number in range(start, stop):
            if _search(pattern, lines[number], bound):
                _fail(f"CHECK-NOT: {pattern}", "is met", lines, number)


def _search(pattern: str, line: str, bound: dict[str, str]) -> re.Match[str] | None:
    parts = re.split(r"(\{\{.*?\}\}|\[\[\w+(?::.*?)?\]\])", pattern)
    text = ""
    for part in parts:
        if part.startswith("{{"):
            text += f"(?:{part[2:-2]})"
        elif part.startswith("[["):
            name, _, expression = part[2:-2].partition(":")
            if not expression and name not in bound:
                raise ArgumentError(
                    f"{pattern!r} names {part}, which no check before it binds.", f"Bind it: [[{name}:regex]]."
                )
            text += f"(?P<{name}>{expression})" if expression else re.escape(bound[name])
        else:
            text += r"\s+".join(map(re.escape, re.split(r"\s+", part)))
    try:
        return re.search(text, line)
    except re.error as error:
        raise ArgumentError(
            f"{pattern!r} holds no regular expression: {error}.", "Mend what stands in {{...}}."
        ) from error


def _fail(check: str, what: str, lines: list[str], at: int) -> NoReturn:
    shown = "\n".join(f"{'->' if number == at else '  '} {line}" for number, line in enumerate(lines))
    raise AssertionError(f"{check!r} {what} from the marked line on:\n{shown}")
