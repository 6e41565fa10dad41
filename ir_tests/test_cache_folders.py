"""Caches that cannot be written, and caches that many processes fill at once (case A19)."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_cpu_library import counting_compiler

from tcport.cache_folders import _settle, settle_cache_folders

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TCPORT_CACHE_DIR")


def test_a_home_below_a_file_moves_what_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "file" / "home"
    home.parent.write_text("in the way")
    for name in ("TRITON_CACHE_DIR", "TCPORT_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "fine"))
    monkeypatch.setenv("HOME", str(home))
    moved = settle_cache_folders()
    assert [sentence.rpartition(": ")[2].split(" is ")[0] for sentence in moved] == [
        "TRITON_CACHE_DIR",
        "TCPORT_CACHE_DIR",
    ]
    assert all(f"{home}" in sentence and "Not a directory" in sentence for sentence in moved)
    for name in VARIABLES:
        assert os.access(os.environ[name], os.W_OK)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "fine")
    assert settle_cache_folders() == ()  # what was chosen can be written


def test_folders_that_can_be_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    assert settle_cache_folders() == ()
    assert [os.environ[name] for name in VARIABLES] == [str(tmp_path / name) for name in VARIABLES]


def test_a_user_without_name_and_home_has_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as any number: there is no entry for it that would name a home."""
    for name in (*VARIABLES, "HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    _settle.cache_clear()
    moved = settle_cache_folders()
    _settle.cache_clear()
    assert [("no home" in said, said.rpartition(": ")[2].split(" is ")[0]) for said in moved] == [
        (True, "TRITON_CACHE_DIR"),
        (True, "TCPORT_CACHE_DIR"),
    ]
    for name in ("TRITON_CACHE_DIR", "TCPORT_CACHE_DIR"):
        assert os.access(os.environ[name], os.W_OK)
        monkeypatch.delenv(name)
    assert list(tmp_path.iterdir()) == []  # no folder of the name "~"


def test_where_nothing_at_all_can_be_written_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    (tmp_path / "file").write_text("in the way")
    for name in VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / "file" / name))
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    _settle.cache_clear()
    assert settle_cache_folders() == tuple(
        f"{name} can name no folder, not even a temporary one: No usable temporary directory found."
        for name in VARIABLES
    )
    _settle.cache_clear()
    assert [os.environ[name] for name in VARIABLES] == [str(tmp_path / "file" / name) for name in VARIABLES]


BELOW_A_FILE = """
import torch, tcport
import torch._dynamo  # it makes Inductor's folder
from test_chain_compiled import expected, new_tokens, state

def layer(q, k, v, kc, vc, table, lens, slots):
    tcport.kv_write(k, v, kc, vc, slots)
    return tcport.paged_attention(q, kc, vc, table, lens)

args = [*new_tokens(), *state()]
table, lens = args[-2:]
slots = table.long().gather(1, ((lens - 1) // 4)[:, None]).squeeze(1) * 4 + (lens - 1) % 4
want = expected(args)
for options in ({}, {"level": "attention"}):
    out = torch.compile(layer, backend="tcport", options=options)(*args, slots)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
print(tcport.last_report(), len(tcport.history.fallbacks()))
"""


def test_below_a_file_a_model_is_compiled_and_right_and_it_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    below = {name: str(tmp_path / "file" / name) for name in (*VARIABLES, "HOME")}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "ir_tests")))
    done = subprocess.run(
        [sys.executable, "-c", BELOW_A_FILE],
        env={**os.environ, **below, "PYTHONPATH": paths, "CXX": str(counting_compiler(tmp_path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].endswith(" 0")  # no kernel failed
    for name in VARIABLES:
        said = f"{below[name]} cannot be written (Not a directory): {name} is "
        assert done.stderr.count(said) == 1


# Forks 8 processes, each round, onto one empty folder. Each does ``work(folder)`` and answers with a digest of what it
# then has; the folder is empty again in the next round.
PROGRAM = """
import hashlib, os, sys
from pathlib import Path
from {module} import {work} as work

folder, rounds, processes = sys.argv[1], int(sys.argv[2]), 8
for number in range(rounds):
    readers = []
    for _ in range(processes):
        reader, writer = os.pipe()
        if os.fork() == 0:
            data = work(Path(folder) / str(number))
            os.write(writer, hashlib.sha256(data).hexdigest().encode())
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    answers = [os.read(reader, 100).decode() for reader in readers]
    assert all(os.waitstatus_to_exitcode(os.wait()[1]) == 0 for _ in readers)
    assert len(set(answers)) == 1 and len(answers[0]) == 64, answers
print("the same", len(answers), "times in each of", rounds, "rounds")
"""


def triton_kernels(folder: Path) -> bytes:
    """Four kernels by Triton's compiler, its cache in ``folder``."""
    import torch
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.call import MergeCall
    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.triton_merge import merge_states

    os.environ["TRITON_CACHE_DIR"] = str(folder)
    cubins = []
    for dim in (16, 32, 64, 128):
        part = torch.empty(4, 2, dim, device="meta"), torch.empty(4, 2, device="meta")
        launch = record(merge_states, MergeCall(*part, *part))[0]
        cubins.append(compile_launch(launch, GPUTarget("cuda", 90, 32)).asm["cubin"])
    return b"".join(cubins)


def cpu_library(folder: Path) -> bytes:
    """The C++ kernels by the compiler in ``CXX``, built into ``folder``."""
    from tcport.kernels import cpu_library

    return cpu_library.build(folder).read_bytes()


def race(work: str, folder: Path, **environment: str) -> int:
    """Run the race; returns the number of rounds. ``TCPORT_TEST_ROUNDS=20`` runs as many."""
    rounds = os.environ.get("TCPORT_TEST_ROUNDS", "2")
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module="test_cache_folders", work=work), str(folder), rounds],
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "ir_tests"))),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240 + 120 * int(rounds),
    )
    assert done.stdout.splitlines()[-1:] == [f"the same 8 times in each of {rounds} rounds"], done.stderr[-3000:]
    return int(rounds)


def test_processes_that_compile_the_same_kernels_into_one_empty_cache_get_the_same(tmp_path: Path) -> None:
    race("triton_kernels", tmp_path)


def test_processes_that_build_the_cpu_library_into_one_empty_cache_build_it_once(tmp_path: Path) -> None:
    rounds = race("cpu_library", tmp_path / "built", CXX=str(counting_compiler(tmp_path)))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len([call for call in calls if "-shared" in call]) == rounds
