"""The documentation is true: every Python block of a page runs, in order, as one program."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import tcport.backend  # noqa: F401  (registers tcport's own passes and lowerings)
from tcport.graph_pass import registered_passes, unregister_pass
from tcport.lowering.registry import registered_operators, rows, unregister_lowering

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
PROGRAMS = {name: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) for name, text in PAGES.items()}


@pytest.fixture
def own_registrations() -> Iterator[None]:
    """A page registers what it likes; what it leaves behind is its fault, and taken away."""
    passes, lowerings = set(registered_passes()), {row for op in registered_operators() for row in rows(op)}
    yield
    left = set(registered_passes()) - passes
    rows_left = {row for op in registered_operators() for row in rows(op)} - lowerings
    for name in left:
        unregister_pass(name)
    for row in rows_left:
        unregister_lowering(row.op, row.name)
    assert (left, rows_left) == (set(), set())


def test_there_is_a_page_for_each_thing_to_write() -> None:
    for name in ("passes.md", "patterns.md", "lowerings.md", "kernels.md", "testing.md"):
        assert PROGRAMS[name], name


@pytest.mark.parametrize("name", [name for name, blocks in PROGRAMS.items() if blocks])
@pytest.mark.usefixtures("own_registrations")
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    # A file of its own, because Triton reads the source of a kernel.
    program = tmp_path / name.replace(".md", "_page.py")
    program.write_text("\n".join(PROGRAMS[name]), encoding="utf-8")
    runpy.run_path(str(program))


@pytest.mark.parametrize("name", PAGES)
def test_links_and_files_exist(name: str) -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", PAGES[name])
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    files = set(re.findall(r"`((?:docs|examples|ir_tests|kernels|lowering|passes|tcport)/[\w./-]+\.\w+)`", PAGES[name]))
    assert {file for file in files if not (ROOT / file).exists()} == set()
