"""Caches that cannot be written, and caches that many processes fill at once (case A19)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tcport.cache_folders import settle_cache_folders

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


PROGRAM = """
import hashlib, os, sys
import torch
from triton.backends.compiler import GPUTarget
from tcport.kernels.offline import compile_launch, record
from tcport.kernels.triton_merge import merge_states
from tcport.kernels.call import MergeCall

def launches():
    for dim in (16, 32, 64, 128):
        part = torch.empty(4, 2, dim, device="meta"), torch.empty(4, 2, device="meta")
        yield from record(merge_states, MergeCall(*part, *part))

folder, rounds, processes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(rounds):
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/{number}"
    readers = []
    for _ in range(processes):
        reader, writer = os.pipe()
        if os.fork() == 0:
            target = GPUTarget("cuda", 90, 32)
            cubins = [compile_launch(launch, target).asm["cubin"] for launch in launches()]
            os.write(writer, hashlib.sha256(b"".join(cubins)).hexdigest().encode())
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    answers = [os.read(reader, 100).decode() for reader in readers]
    assert all(os.waitstatus_to_exitcode(os.wait()[1]) == 0 for _ in readers)
    assert len(set(answers)) == 1 and len(answers[0]) == 64, answers
print("the same", len(answers), "times")
"""


def test_processes_that_fill_one_empty_cache_get_the_same(tmp_path: Path) -> None:
    """TCPORT_TEST_ROUNDS=20 runs as many rounds; one is enough to see a race that is always lost."""
    rounds = os.environ.get("TCPORT_TEST_ROUNDS", "1")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), rounds, "8"],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120 + 60 * int(rounds),
    )
    assert done.stdout.splitlines()[-1:] == ["the same 8 times"], done.stderr[-3000:]
