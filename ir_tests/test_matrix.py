"""The matrix of targets: its cells, and what it says of them; two cells are really compiled."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tcport.cli import app
from tcport.errors import ArgumentError
from tcport.tiling import fit as fit_module
from tcport.tiling import matrix
from tcport.tiling.footprint import Compiled, Footprint
from tcport.tiling.matrix import DEVICES, Cell, Outcome, cells, compile_cell, profile_of, run
from tcport.tiling.matrix_tables import counts, summary, table
from tcport.tiling.workers import OutOfTimeError, Worker


def test_it_has_every_combination() -> None:
    every = cells()
    assert len(every) == 13 * 2 * 3 * 7 * 5 + 2 * 3 * 4  # and the kernel for Hopper: no fp8, no pages of one key
    first = {(cell.dtype, cell.dim, cell.page) for cell in every[: 13 * 2 + 1]}
    assert first == {("bfloat16", 128, 16)}  # what is met most is compiled first
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


DECODE = Cell("sm_80", "decode", "bfloat16", 128, 16)
SPILLS = Outcome(
    dataclasses.replace(DECODE, dim=256), "16x32 w4 st2", 80_000, 166_912, 255, 64, 128, 2, ("a: b", "c: d")
)
REFUSED = Outcome(dataclasses.replace(DECODE, dim=512), refusal="no tile fits")


def test_the_summary_counts_refusals_spills_and_what_is_left() -> None:
    left = Cell("gfx942", "prefill", "float16", 64, 1)
    outcomes = [Outcome(DECODE, "16x64 w2 st2", 40_000, 166_912, 120, 0, 64, 4), SPILLS, REFUSED]
    todo = [*(outcome.cell for outcome in outcomes), left]
    text = summary(todo, outcomes)
    assert text.startswith(
        "4 cells: 2 compiled, 0 over a limit, 0 spilling with no tile that might not, 1 spilling with tiles untried, "
        "1 refused, 1 not compiled\n"
    )
    assert "| sm_80 | decode | bfloat16 | 3 | 80000 of 166912 | 255 | 1 | 1 | 2 |" in text
    assert "- sm_80 decode bfloat16 D 512 page 16: no tile fits `torch_attention` takes it." in text
    assert (
        "- sm_80 decode bfloat16 D 256 page 16: 16x32 w4 st2, 64 bytes of a thread, the least of 3 tiles tried; "
        "others were not tried" in text
    )
    assert text.endswith("\nNot compiled:\n\n- gfx942 prefill float16 D 64 page 1\n")
    known = summary(todo, [dataclasses.replace(SPILLS, exhausted=True)])
    assert "1 spilling with no tile that might not, 0 spilling with tiles untried" in known
    assert "none is left that might not" in known


def test_the_table_has_a_row_for_each_cell() -> None:
    rows = list(csv.DictReader(table([SPILLS, REFUSED]).splitlines()))
    assert [row["instead"] for row in rows] == ["", "torch_attention"]
    assert (rows[0]["shared"], rows[0]["registers"], rows[0]["spill"], rows[0]["occupancy"]) == (
        "80000",
        "255",
        "64",
        "2",
    )
    assert rows[0]["steps"] == "2"
    assert table([]) == ""


def test_the_plain_kernel_takes_what_the_one_for_hopper_does_not() -> None:
    refused = Outcome(Cell("sm_90", "hopper_prefill", "bfloat16", 128, 16), refusal="too big")
    assert refused.to_dict()["instead"] == "triton_prefill"


def test_a_tile_that_spills_is_gone_into_until_nothing_is_left_that_might_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(spill: int) -> None:
        def measured(spec: object, tiles: list, profile: object, entry: object, cache: object) -> list[Compiled]:
            bytes_each = [spill if tile.num_warps < 8 else 0 for tile in tiles]
            return [
                Compiled((Footprint("k", 1, 96, n, 32 * t.num_warps),)) for n, t in zip(bytes_each, tiles, strict=True)
            ]

        monkeypatch.setattr(fit_module, "measure", measured)

    install(64)
    soon = compile_cell(DECODE, 0)
    assert (soon.spill, soon.exhausted, len(soon.steps)) == (64, False, 0)
    soon = compile_cell(DECODE, 1)
    assert (soon.spill, len(soon.steps)) == (0, 1)
    told: list[Outcome] = []
    (outcome,) = run([DECODE], 1, told.append)
    assert outcome.spill == 0
    assert " w8 " in outcome.tile
    assert counts([DECODE], [outcome]).startswith("1 cells: 1 compiled, 0 over a limit, 0 spilling")

    monkeypatch.setattr(matrix, "RUN_TIME_STEPS", 0)
    assert run([DECODE], 1, told.append)[0].spill == 0
    assert [outcome.spill for outcome in told[-2:]] == [64, 0]


def test_a_compile_under_way_ends_with_the_time() -> None:
    worker = Worker("time", end=time.monotonic() - 1)
    with pytest.raises(OutOfTimeError):
        worker.ask({})
    slow = Worker("compile_nothing", end=time.monotonic() + 0.5)
    slow._command = ["sleep", "60"]
    with pytest.raises(OutOfTimeError):
        slow.ask({})


def test_a_cell_over_its_limit_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(todo: list[Cell], jobs: int, done: object, seconds: float) -> list[Outcome]:
        return [
            Outcome(cell, "16x16 w1 st1", shared, 65_536, 32, spill, 32, 1)
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
    for sizes, spill, code in (((65_536, 1), 0, 0), ((65_537, 1), 0, 1), ((65_536, 1), 8, 1)):  # noqa: B007 - read above
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert [row["shared"] for row in json.loads((tmp_path / "matrix.json").read_text())] == list(sizes)
        assert "| gfx90a | prefill | bfloat16 | 1 |" in (tmp_path / "matrix.md").read_text()
        assert len((tmp_path / "matrix.csv").read_text().splitlines()) == 3
    assert CliRunner().invoke(app, [*arguments[:4], "sm_1"]).exit_code == 1


def test_a_run_out_of_time_says_what_is_missing(tmp_path: Path) -> None:
    arguments = ["matrix", "-o", str(tmp_path), "--targets", "sm_80", "--dtypes", "bf16", "--dims", "64"]
    result = CliRunner().invoke(app, [*arguments, "--pages", "16", "--seconds", "0"])
    assert result.exit_code == 1
    assert "2 cells: 0 compiled, 0 over a limit," in result.output
    assert "- sm_80 decode bfloat16 D 64 page 16" in (tmp_path / "matrix.md").read_text()
