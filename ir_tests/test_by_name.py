"""The backend by name: a fresh process says ``backend="tcport"`` and imports nothing of tcport (case A13)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import sys, torch
def f(x):
    return torch.relu(x) + 1
assert "tcport" in torch.compiler.list_backends(exclude_tags=()), torch.compiler.list_backends()
out = torch.compile(f, backend="tcport", fullgraph=True)(torch.tensor([-1.0, 2.0]))
assert out.tolist() == [1.0, 3.0], out
assert "tcport.backend" in sys.modules
"""


THREADS = """
import threading, torch
from torch._dynamo.backends import registry
together, compiled, raised = threading.Barrier(6), [], []
def look_up():
    together.wait()
    try:
        compiled.append(torch.compile(lambda x: torch.relu(x) + 1, backend="tcport"))
    except Exception as error:
        raised.append(repr(error))
threads = [threading.Thread(target=look_up) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert raised == [], raised
# One after the other: torch 2.11 itself, under any backend, dies of first calls in several threads.
outs = [run(torch.tensor([-1.0, 2.0])).tolist() for run in compiled]
assert outs == [[1.0, 3.0]] * 6, outs
from tcport.backend import tcport
assert registry.lookup_backend("tcport") is tcport
assert "tcport" in torch.compiler.list_backends()
registry.register_backend(lambda gm, inputs: gm, name="another")
try:
    registry.register_backend(lambda gm, inputs: gm, name="another")
except AssertionError as error:
    assert "duplicate name: another" in str(error)
else:
    raise SystemExit("every name may be taken twice")
"""


@pytest.mark.parametrize("program", [PROGRAM, THREADS], ids=["no import", "six threads at once"])
def test_a_fresh_process_needs_no_import(program: str, tmp_path: Path) -> None:
    """The entry point is what an installed package has; here it is written by hand beside the checkout."""
    info = tmp_path / "tcport-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tcport\nVersion: 0.1.0\n")
    declared = (ROOT / "pyproject.toml").read_text().partition("torch_dynamo_backends")[2].split("\n")[1]
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\n" + declared.replace('"', "") + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
