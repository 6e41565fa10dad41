"""The sweep: its shapes and tiles, what it makes of times, and its run; times themselves are taken on a GPU only."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from typer.testing import CliRunner

import tcport
from tcport.bench import sweep as module
from tcport.bench.cases import Case, parse_case
from tcport.bench.inputs import Inputs
from tcport.bench.shapes import SHAPES
from tcport.bench.sweep import Sweep, Timing, geometric_mean, ranked_tiles, tiles_of, time_tiles
from tcport.bench.sweep_run import Job, jobs_for, jobs_to_confirm, read, run
from tcport.cli import app
from tcport.device import catalogue_profile
from tcport.ir import TileConfig
from tcport.kernels.offline import compile_ahead, record
from tcport.kernels.target import targeting

H200 = catalogue_profile("h200")
SM_90 = GPUTarget("cuda", 90, 32)
TILES = tuple(TileConfig(16, n, 2, 2) for n in (16, 32, 64, 128))
CASE = parse_case("h4-2 d16 b2 c40 fp32")


def test_the_shapes_are_many_and_of_every_kind() -> None:
    assert len({case.name for case in SHAPES}) == len(SHAPES) >= 40
    assert {case.kind for case in SHAPES} == {"decode", "prefill", "mixed"}
    assert any(case.q_lens and case.kind == "decode" for case in SHAPES)
    assert any(len(set(case.lens)) > 10 for case in SHAPES)


def test_the_first_choice_is_compared_with_the_best(tmp_path: Path) -> None:
    fair = Sweep(CASE, tuple(Timing(tile, time) for tile, time in zip(TILES, (11.0, 10.0, 30.0), strict=False)))
    perfect = Sweep(CASE, (Timing(TILES[0], 5.0), Timing(TILES[1], 6.0, "once")), ((TILES[2], "out of resource"),))
    assert (fair.first.tile, fair.best.tile, fair.ratio) == (TILES[0], TILES[1], 1.1)
    assert perfect.ratio == 1.0
    assert geometric_mean([fair, perfect]) == pytest.approx(1.1**0.5)
    (tmp_path / "a.json").write_text(json.dumps(fair.to_dict()))
    (tmp_path / "b.json").write_text(json.dumps(perfect.to_dict()))
    assert read(tmp_path) == [fair, perfect]


@pytest.mark.parametrize("case", ["h8-8 d64 b1 c4096", "h32-8 d128 b256 c512", "h32-8 d128 b64 c4096 q4"])
def test_other_split_counts_are_tried(case: str) -> None:
    tiles = tiles_of(parse_case(case), H200)
    by_shape: dict[TileConfig, list[int]] = {}
    for tile in tiles:
        by_shape.setdefault(dataclasses.replace(tile, num_splits=1), []).append(int(tile.num_splits))
    assert len(tiles) == len(set(tiles))
    for first, *others in by_shape.values():
        assert sorted(others) == sorted({max(1, first // 2), first * 2} - {first})


class Stopwatch:
    """Says what the test wants: a time for each tile alone, and one for it beside others."""

    def __init__(self, alone: dict[TileConfig, float], beside: dict[TileConfig, float]) -> None:
        self.alone, self.beside, self.asked = alone, beside, list[int]()

    def rounds(self, runs: Sequence[module.Run], inputs: Sequence[Inputs], rounds: int) -> list[tuple[float, ...]]:
        self.asked.append(len(runs))
        tiles = [run.keywords["tile"] for run in runs]  # type: ignore[attr-defined]
        times = self.alone if len(runs) == 1 and rounds == 3 else self.beside
        return [tuple(times[tile] * (1 + (number == 0)) for tile in tiles) for number in range(rounds)]

    def look(self, run: module.Run, inputs: Inputs) -> float:
        return self.alone[run.keywords["tile"]]  # type: ignore[attr-defined]


def test_tiles_are_checked_timed_and_the_fastest_timed_again_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(inputs: Inputs, tile: TileConfig) -> torch.Tensor:
        if tile == other:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        out = tcport.paged_attention(**inputs.arguments)
        assert isinstance(out, torch.Tensor)
        return out * (2 if tile == bad else 1)

    bad, other, slow = TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 2), TileConfig(16, 16, 4, 3)
    monkeypatch.setattr(module, "attend", attend)
    alone = dict(zip([*TILES, slow], (1030.0, 1000.0, 1040.0, 2000.0, 4001.0), strict=True))
    watch = Stopwatch(alone, {TILES[0]: 990.0, TILES[1]: 1010.0, TILES[2]: 1005.0})
    done = time_tiles(CASE, [*TILES, bad, other, slow], "cpu", watch.rounds, watch.look)
    assert done.timings == (
        Timing(TILES[0], 990.0, "paired"),
        Timing(TILES[1], 1010.0, "paired"),
        Timing(TILES[2], 1005.0, "paired"),
        Timing(TILES[3], 2000.0, "graph"),
        Timing(slow, 4001.0, "once"),
    )
    assert watch.asked == [1, 1, 1, 1, 3]
    assert [tile for tile, _ in done.refused] == [other]
    assert "shared memory" in done.refused[0][1]
    assert [tile for tile, _ in done.wrong] == [bad]
    assert "results are off by" in done.wrong[0][1]


@pytest.mark.parametrize("case", [CASE, parse_case("h4-2 d16 b1 c40 q8 kv:fp8")], ids=lambda case: case.name)
def test_one_entry_of_a_job_compiles_all_that_its_tile_launches(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = Job(case, (dataclasses.replace(TILES[0], num_splits=7),), tmp_path).kernels()
    ((small, tile),) = kernels.values()
    with targeting(SM_90):
        launches = record(module.entry_of(small), module.meta_call(small), tile)
    for launch in launches:
        compile_ahead(launch, SM_90)
    cubins = sorted(tmp_path.glob("*/*.cubin"))
    assert sorted(path.stem for path in cubins) == ["combine_kernel", "paged_attention_kernel"]


def timed(job: Job, gpu: int) -> Sweep:
    """In a process of its own: a time, an error, or the process's end, as the case's name says."""
    if job.case.label == "breaks":
        raise ValueError("this case breaks")
    if job.case.label == "dies":
        os._exit(3)
    return Sweep(job.case, tuple(Timing(tile, 10.0 + gpu) for tile in job.tiles))


def test_a_run_keeps_what_it_has_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    cases = [dataclasses.replace(CASE, label=label) for label in ("first", "breaks", "dies", "last")]
    jobs = [Job(case, TILES[:2], tmp_path / f"{case.label}.json") for case in cases]
    assert len({key for job in jobs for key in job.kernels()}) == 2
    told: dict[str, Sweep | str] = {}
    run(jobs, 1, [5], SM_90, timed=timed, told=lambda job, outcome: told.update({job.case.label: outcome}))
    assert told["breaks"] == "ValueError: this case breaks"
    assert "BrokenProcessPool" in str(told["dies"])
    assert read(tmp_path) == [told["first"], told["last"]]
    assert [timing.microseconds for timing in read(tmp_path)[0].timings] == [15.0, 15.0]
    assert len(list((tmp_path / "cache").glob("*/paged_attention_kernel.cubin"))) == 2
    told.clear()
    jobs[1] = dataclasses.replace(jobs[1], case=cases[0])
    run(jobs, 1, [6], SM_90, timed=timed, told=lambda job, outcome: told.update({job.file.stem: outcome}))
    assert sorted(told) == ["breaks", "dies"]
    assert [each.timings[0].microseconds for each in read(tmp_path)] == [16.0, 15.0, 15.0]


def test_a_run_begins_nothing_after_its_time(tmp_path: Path) -> None:
    run([Job(CASE, TILES[:1], tmp_path / "a.json")], 1, [0], SM_90, seconds=0, timed=timed)
    assert read(tmp_path) == []


def test_a_second_run_confirms_the_first_choice_of_today(tmp_path: Path) -> None:
    case = parse_case("h32-8 d128 b64 c8192")
    first, *others = ranked_tiles(case, H200)
    known = Sweep(case, tuple(Timing(tile, 100.0 - place) for place, tile in enumerate(others)))
    (job,) = jobs_to_confirm([known], H200, tmp_path, best=2)
    assert job.tiles == (first, others[-1], others[-2])
    (whole,) = jobs_for([case], H200, tmp_path)
    assert (whole.case, whole.file) == (case, job.file)
    assert list(whole.tiles[: len(others) + 1]) == [first, *others]


def test_a_sweep_needs_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        result = CliRunner().invoke(app, ["sweep", "-o", str(tmp_path)])
        assert result.exit_code == 1
        assert "no CUDA GPU" in result.output


@pytest.mark.gpu
def test_a_sweep_runs_and_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["sweep", "--case", "h8-2 d64 b2 c128", "--jobs", "8"]
    for more in (["-o", str(tmp_path / "all")], ["-o", str(tmp_path / "few"), "--confirm", str(tmp_path / "all")]):
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
    (whole,), (few,) = read(tmp_path / "all"), read(tmp_path / "few")
    assert len(whole.timings) > 20 > len(few.timings) >= 4
    assert few.first.tile == whole.first.tile
    # The GPU's process found every kernel in the cache: it compiled none under another name.
    kernels = Job(whole.case, tuple(timing.tile for timing in whole.timings), tmp_path).kernels()
    cubins = list((tmp_path / "cache").glob("*/paged_attention_kernel.cubin"))
    assert len(cubins) == len(kernels) + len(whole.refused)
