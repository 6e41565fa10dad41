"""``.ci/race.py``: its plumbing with invented times, and its arithmetic."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from race_scripts import ROOT, processes, race
from typer.testing import CliRunner

import tcport
from tcport.bench.cases import Case

FILES = (
    *(f".ci/{name}.py" for name in ("race", "race_processes", "race_worker")),
    *(f"tcport/{name}.py" for name in ("errors", "bench/__init__", "bench/cases")),
)

app = typer.Typer()
app.command()(race.main)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Trees that nothing but the dry race could run."""
    found = [tmp_path / name for name in "abc"]
    for folder in found:
        (folder / "tcport").mkdir(parents=True)
        (folder / "tcport" / "__init__.py").touch()
    return found


# Trees


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repository), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The scripts and what they import of tcport in two commits, and a change that is not committed."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    root = tmp_path / "repository"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "kernels").mkdir()
    (root / "kernels" / "kernel.py").touch()
    (root / "tcport" / "kernels").symlink_to("../kernels")
    git(root, "init", "--quiet")
    for text in ("old", "new"):
        (root / "tcport" / "__init__.py").write_text(f"name = {text!r}\n")
        git(root, "add", "-A")
        git(root, "commit", "--quiet", "-m", text)
    (root / "tcport" / "__init__.py").write_text("name = 'changed'\n")
    return root


def test_two_revisions_dry(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / ".ci" / "race.py"), "HEAD~1", "HEAD", "--dry", "--seconds", "0.1"]
    command += ["--json", str(tmp_path / "out.json"), "--case", "1x512", "--case", "decode1x8192/33"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["trees"] == {name: git(repository, "rev-parse", name) for name in ("HEAD~1", "HEAD")}
    assert list(result["cases"]) == ["1x512", "decode1x8192/33"]
    for row in result["cases"].values():
        assert list(row["trees"]) == ["HEAD~1", "HEAD", "HEAD~1 again"]
        assert all(99 <= tree["us"] <= 101 for tree in row["trees"].values())
        assert all(set(times) == set(row["trees"]) for times in row["rounds"])
    assert [row["num_splits"] for row in result["cases"].values()] == [None, 33]
    assert "TFLOP/s" in done.stdout
    assert "TB/s" in done.stdout
    assert "times are invented" in done.stdout
    assert not list(tmp_path.glob("race-*"))


def test_a_revision_is_exported_as_it_was_committed(repository: Path, tmp_path: Path) -> None:
    for revision, text in (("HEAD~1", "old"), ("HEAD", "new")):
        found = race.tree(revision, tmp_path / text, repository)
        assert (found.path / "tcport" / "__init__.py").read_text() == f"name = {text!r}\n"
        assert found.source == git(repository, "rev-parse", revision)
        assert (found.path / "tcport" / "kernels").is_symlink()
        assert (found.path / "tcport" / "kernels" / "kernel.py").is_file()
    working = race.tree(str(repository), tmp_path / "working", repository)
    assert working.path == repository
    assert not (tmp_path / "working").exists()


def test_a_revision_goes_before_a_folder(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "branch", "repository")
    monkeypatch.chdir(tmp_path)
    assert race.tree("repository", tmp_path / "exported", repository).path == tmp_path / "exported"
    assert race.tree("./repository", tmp_path / "other", repository).path == repository


def test_without_git_there_are_only_folders(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert race.tree(str(folders[0]), folders[0] / "no").path == folders[0]
    with pytest.raises(tcport.errors.ArgumentError, match="'HEAD' is no revision"):
        race.tree("HEAD", folders[0] / "no")


# Arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "takes two trees or more"),
        (["a"], "takes two trees or more"),
        (["a", "a"], "a is named twice"),
        (["a", "b"], "needs a CUDA GPU. --dry tries the plumbing"),
        (["a", "b", "--dry", "--case", "2x3"], "no case '2x3'. Choose from 1x512, 1x4096, 8x2048"),
        (["a", "b", "--dry", "--case", "1x512/0"], "no case '1x512/0'"),
        (["a", "b", "--dry", "--case", "1x512/"], "no case '1x512/'"),
        (["a", "b", "--dry", "--case", "b1 c64 write"], "but for writes"),
        (["a", "nothing", "--dry"], "'nothing' is no revision of"),
        (["a", "a/tcport", "--dry"], "a/tcport holds no package tcport"),
        (["a", "b", "--dry", "--json", "nowhere/out.json"], "its folder does not exist"),
    ],
)
def test_errors(arguments: list[str], said: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders[0].parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(processes, "WORKER", None)  # none is started
    done = run(*arguments)
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


def test_cases_are_the_bench_s() -> None:
    assert race.entry("1x512") == race.Entry(Case("prefill", (512,), (512,)))
    assert race.entry("chunk").case == Case("prefill", (16384,), (2048,))
    assert race.entry("d64").case == Case("prefill", (4096,), (4096,), dims=(64, 64))
    assert race.entry("decode8x2048").case == Case("decode", (2048,) * 8)
    assert race.entry("decode1x8192/33") == race.Entry(Case("decode", (8192,)), 33)
    assert race.entry("ragged64").case == race.entry("ragged 64, 32 to 32768").case
    assert race.entry("h8 d64 b2 c96 fp16").case == Case(
        "decode", (96, 96), heads=(8, 8), dims=(64, 64), dtype="float16", kv_dtype="float16"
    )
    listed = run("--list").output
    for name in race.ALL:
        assert f"{'*' if name in race.USUAL else ' '} {name} " in listed
        assert race.entry(name).case.name in listed


def test_rates() -> None:
    """Decodes by what they read, 4 KB a token; others by their two products."""
    assert race.entry("decode1x8192").rate(10) == "3.36 TB/s"
    assert race.entry("1x4096").rate(250) == f"{4 * 32 * 128 * (4096 * 4097 / 2) / 250e6:.1f} TFLOP/s"


# Times


def test_ratios() -> None:
    """The medians' ratio is that of a hot and a cold round; within the rounds it is 0.9 mostly."""
    rounds = [{"a": 100.0, "b": 90.0}, {"b": 190.0, "a": 200.0}, {"a": 400.0, "b": 360.0}]
    found = processes.summary(rounds, "b", "a")
    assert found.us == 190
    assert found.ratio == 0.95
    assert found.paired == 0.9
    assert found.quartiles == (140, 275)
    assert found.rounds == 3
    assert (processes.summary(rounds, "a", "a").ratio, processes.summary(rounds, "a", "a").paired) == (1, 1)


def test_ratios_of_what_is_missing() -> None:
    only_once = processes.summary([{"a": 100.0, "b": 50.0}, {"a": 300.0}], "b", "a")
    assert (only_once.ratio, only_once.paired, only_once.quartiles) == (0.25, 0.5, (50, 50))
    without_first = processes.summary([{"b": 50.0}], "b", "a")
    assert (without_first.us, without_first.ratio, without_first.paired) == (50, None, None)
    assert processes.summary([{"b": 50.0}, {}], "a", "b") is None


class Timed:
    """A process that fails when another is timed beside it, or from a given burst on."""

    busy = threading.Lock()
    order: list[tuple[str, str]]

    def __init__(self, label: str, order: list[tuple[str, str]], fails_after: int = 10**9) -> None:
        self.label, self.order, self.fails_after = label, order, fails_after
        self.failed: dict[str, str] = {}

    def ask(self, limit: float, method: str, *arguments: Any) -> dict[str, Any]:
        assert method == "time"
        assert self.busy.acquire(blocking=False), "two processes at a time"
        try:
            self.order.append((arguments[0], self.label))
            self.fails_after -= 1
            return {"us": 1.0} if self.fails_after >= 0 else {"failed": "out of order"}
        finally:
            self.busy.release()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 1 s whenever it is looked at."""
    clock = iter(range(10**6))
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(clock))


@pytest.mark.usefixtures("seconds")
def test_the_order_is_drawn_anew_and_is_fair() -> None:
    order: list[tuple[str, str]] = []
    rounds = processes.race([Timed(label, order) for label in "abc"], ["x", "y"], 60, random.Random(1))
    assert len(rounds["x"]) > 10
    assert abs(len(rounds["x"]) - len(rounds["y"])) <= 1
    turns = [order[place : place + 3] for place in range(0, len(order), 3)]
    for turn in turns:  # all trees of one case, then of the next
        assert len({name for name, _ in turn}) == 1
        assert sorted(label for _, label in turn) == ["a", "b", "c"]
    assert len({tuple(label for _, label in turn) for turn in turns}) == 6
    assert {tuple(turn[0][0] for turn in turns[place : place + 2]) for place in range(0, len(turns) - 1, 2)} == {
        ("x", "y"),
        ("y", "x"),
    }


@pytest.mark.usefixtures("seconds")
def test_the_first_round_is_finished() -> None:
    rounds = processes.race([Timed("a", [])], ["x", "y", "z"], 0, random.Random(1))
    assert rounds == {name: [{"a": 1.0}] for name in "xyz"}


@pytest.mark.usefixtures("seconds")
def test_a_tree_that_fails_is_left_out_with_the_times_it_had() -> None:
    order: list[tuple[str, str]] = []
    workers = [Timed("a", order), Timed("b", order, fails_after=3), Timed("c", order)]
    workers[2].failed["x"] = "not built"
    rounds = processes.race(workers, ["x"], 30, random.Random(1))
    assert all(times == {"a": 1.0} for times in rounds["x"])
    assert len(rounds["x"]) > 10
    assert workers[1].failed == {"x": "out of order"}
    assert [label for _, label in order].count("b") == 4
    assert ("x", "c") not in order


@pytest.mark.usefixtures("seconds")
def test_a_race_of_none_ends() -> None:
    workers = [Timed(label, [], fails_after=0) for label in "ab"]
    assert processes.race(workers, ["x"], 10**5, random.Random(1)) == {"x": [{}]}


# Processes

FAKE = """
import json, sys, time
tree = sys.argv[1][-1]
for line in sys.stdin:
    method, *arguments = json.loads(line)
    answer = {"us": 10.0 * " abc".index(tree), "error": 0.0, "remark": "a step down" if tree == "c" else ""}
    if tree == "b" and method == "time":
        sys.exit("injected end")
    if tree == "c" and method == "build" and arguments[0] == "1x512":
        answer = {"failed": "ValueError: injected"}
    if tree == "c" and method == "build" and arguments[0] == "1x4096":
        time.sleep(60)
    print(json.dumps(answer), flush=True)
"""


def test_trees_that_fail_end_and_hang(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake.py").write_text(FAKE)  # a takes 10 us, b ends when it is timed, c fails a case and hangs in one
    monkeypatch.setattr(processes, "WORKER", tmp_path / "fake.py")
    monkeypatch.setattr(processes, "BUILD_S", 1.5)
    names = ("1x512", "decode1x8192", "1x4096")
    chosen = [part for name in names for part in ("--case", name)]
    done = run(*folders, "--dry", "--seconds", 0.1, "--json", tmp_path / "out.json", *chosen)
    assert done.exit_code == 1
    a, b, c = (str(folder) for folder in folders)
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    for row in cases.values():
        assert row["trees"][a]["us"] == row["trees"][f"{a} again"]["us"] == 10
        assert "injected end" in row["failed"][b]
        assert "ended with 1" in row["failed"][b]
        assert b not in row["trees"]
        assert all(b not in times for times in row["rounds"])
    assert cases["1x512"]["failed"][c] == "ValueError: injected"
    assert cases["1x4096"]["failed"][c] == "build was not done in 1.5 s"
    assert "was not done" in cases["decode1x8192"]["failed"][c], "its process is gone"
    printed = " ".join(done.output.split())
    assert f"{c} is left out: ValueError: injected" in printed
    assert f"{c} fell back: a step down" in printed


def test_each_tree_has_caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake.py").write_text("import json, os; input(); print(json.dumps(dict(os.environ)), flush=True)")
    monkeypatch.setattr(processes, "WORKER", tmp_path / "fake.py")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/everyone")
    seen = []
    for name in ("one", "other", "one"):
        each = processes.Worker(name, tmp_path / "tree", tmp_path / name)
        seen.append(each.ask(30, "start"))
        each.end()
    for variable in processes.CACHES:
        assert [environment[variable] for environment in seen] == [
            str(tmp_path / name / variable.lower()) for name in ("one", "other", "one")
        ]
    assert seen[0]["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "tree")
