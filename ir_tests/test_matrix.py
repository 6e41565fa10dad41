"""The matrix of targets: its cells, and what it says of them; two cells are really compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tcport.cli import app
from tcport.errors import ArgumentError
from tcport.tiling.matrix import DEVICES, Cell, Outcome, cells, profile_of, run, summary


def test_it_has_every_combination() -> None:
    assert len(cells()) == 13 * 2 * 3 * 7 * 5 + 2 * 3 * 4  # and the kernel for Hopper: no fp8, no pages of one key
    assert cells(["sm_90"], ["bfloat16"], [128], [16]) == [
        Cell("sm_90", "decode", "bfloat16", 128, 16),
        Cell("sm_90", "prefill", "bfloat16", 128, 16),
        Cell("sm_90", "hopper_prefill", "bfloat16", 128, 16),
    ]
    with pytest.raises(ArgumentError, match="no target 'sm_70'"):
        cells(["sm_70"])


@pytest.mark.parametrize("target", DEVICES)
def test_a_device_stands_for_each_target(target: str) -> None:
    profile = profile_of(target)
    assert profile.arch == target
    assert profile.shared_per_cta_optin or profile.shared_per_cta


def test_cells_are_compiled_and_fit() -> None:
    todo = [Cell("sm_86", "decode", "float8_e4m3fn", 64, 16), Cell("gfx942", "prefill", "float16", 80, 1)]
    told: list[Cell] = []
    outcomes = run(todo, 1, lambda outcome: told.append(outcome.cell))
    assert told == todo
    for outcome, limit in zip(outcomes, (99 << 10, 64 << 10), strict=True):
        assert outcome.refusal == ""
        assert 0 < outcome.shared <= limit == outcome.shared_limit
        assert outcome.registers > 0
        assert outcome.threads in (32, 64, 128, 256, 512, 1024)
        assert outcome.occupancy >= 1
        assert outcome.spill == 0


def test_the_summary_counts_refusals_and_spills() -> None:
    decode = Cell("sm_80", "decode", "bfloat16", 128, 16)
    wide = Cell("sm_80", "decode", "bfloat16", 512, 16)
    text = summary(
        [
            Outcome(decode, "16x64 w2 st2", 40_000, 166_912, 120, 0, 64, 4),
            Outcome(Cell("sm_80", "decode", "bfloat16", 256, 16), "16x32 w4 st2", 80_000, 166_912, 255, 64, 128, 2),
            Outcome(wide, refusal="no tile fits"),
        ]
    )
    assert "| sm_80 | decode | bfloat16 | 3 | 80000 of 166912 | 255 | 1 | 1 | 2 |" in text
    assert "- sm_80 decode bfloat16 D 512 page 16: no tile fits `torch_attention` takes it." in text
    assert "- sm_80 decode bfloat16 D 256 page 16: 16x32 w4 st2, 64 bytes of a thread" in text
    assert Outcome(wide, refusal="no tile fits").to_dict()["instead"] == "torch_attention"


def test_a_cell_over_its_limit_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(todo: list[Cell], jobs: int, done: object, seconds: float) -> list[Outcome]:
        return [
            Outcome(cell, "16x16 w1 st1", shared, 65_536, 32, 0, 32, 1)
            for cell, shared in zip(todo, sizes, strict=True)
        ]

    monkeypatch.setattr("tcport.cli.run_matrix", compiled)
    arguments = [
        "matrix",
        "-o",
        str(tmp_path),
        "--targets",
        "gfx90a",
        "--dtypes",
        "bf16",
        "--dims",
        "64",
        "--pages",
        "16",
    ]
    for sizes, code in (((65_536, 1), 0), ((65_537, 1), 1)):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert [row["shared"] for row in json.loads((tmp_path / "matrix.json").read_text())] == list(sizes)
        assert "| gfx90a | prefill | bfloat16 | 1 |" in (tmp_path / "matrix.md").read_text()
    assert CliRunner().invoke(app, [*arguments[:4], "sm_1"]).exit_code == 1


def test_a_run_out_of_time_says_what_is_missing(tmp_path: Path) -> None:
    arguments = ["matrix", "-o", str(tmp_path), "--targets", "sm_80", "--dtypes", "bf16", "--dims", "64"]
    result = CliRunner().invoke(app, [*arguments, "--pages", "16", "--seconds", "0"])
    assert result.exit_code == 1
    assert "0 cells, 0 over a limit, 2 not begun in time" in result.output
