"""Inductor's cache across processes: warm when nothing changed, cold when a kernel or a lowering did."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import json, sys, torch
from torch._dynamo.utils import counters
import tcport
from tcport.backend import tcport as backend
assert tcport.__file__.startswith(sys.argv[1]), tcport.__file__

def attend(q, k, v, kc, vc, table, lens, slots):
    tcport.kv_write(k, v, kc, vc, slots)
    return tcport.paged_attention(q * 2, kc, vc, table, lens)

if "pass" in sys.argv[2:]:
    @tcport.register_pass(name="mine")
    def mine(graph, ctx):
        return 0

options = {}
if "anonymous" in sys.argv[2:]:
    options["post_grad_custom_pre_pass"] = lambda graph: None

torch.manual_seed(0)
caches = torch.randn(8, 4, 2, 16), torch.randn(8, 4, 2, 16)
args = (torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16), *caches,
        torch.tensor([[0, 1], [2, 3]]), torch.tensor([3, 7]), torch.tensor([2, 14]))
with tcport.history.collected() as report:
    out = torch.compile(attend, backend=backend, options=options)(*args)
found = counters["inductor"]
print(json.dumps({
    "hit": found["fxgraph_cache_hit"], "miss": found["fxgraph_cache_miss"], "bypass": found["fxgraph_cache_bypass"],
    "from_cache": report.graphs[0].from_cache, "notes": report.graphs[0].notes, "sum": out.double().sum().item(),
}))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources that a test may edit."""
    for name in ("tcport", "passes", "lowering", "kernels"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "src" / name, symlinks=True, ignore=ignore)
    return tmp_path / "src"


def run(checkout: Path, *flags: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(checkout.parent / "cache"),
    }
    command = [sys.executable, "-c", PROGRAM, str(checkout), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=checkout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_warm_in_a_second_process_and_cold_after_an_edit(checkout: Path) -> None:
    first = run(checkout)
    assert (first["hit"], first["miss"], first["bypass"], first["from_cache"]) == (0, 1, 0, False)
    second = run(checkout)
    assert (second["hit"], second["miss"], second["bypass"], second["from_cache"]) == (1, 0, 0, True)
    assert second["sum"] == first["sum"]
    for edited in ("kernels/decomposition.py", "lowering/kv_write.py"):
        with open(checkout / edited, "a") as source:
            source.write("\n# edited\n")
        again = run(checkout)
        assert (again["hit"], again["miss"], again["from_cache"]) == (0, 1, False), edited
        assert again["sum"] == first["sum"]


def test_a_registered_pass_has_an_identity_and_an_anonymous_one_is_reported(checkout: Path) -> None:
    assert run(checkout)["miss"] == 1
    assert run(checkout, "pass")["miss"] == 1  # another pipeline, another key
    assert run(checkout, "pass")["hit"] == 1
    anonymous = run(checkout, "anonymous")
    assert (anonymous["hit"], anonymous["from_cache"]) == (0, False)
    assert anonymous["bypass"] > 0
    assert any("cache is off" in note for note in anonymous["notes"])
