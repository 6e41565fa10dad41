"""``python -m tcport doctor``: it always reports, names each problem, and exits accordingly (cases A18, A19)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tcport", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def findings(**environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = doctor("--json", **environment)
    assert done.stdout, done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_a_sound_machine_passes_and_attention_was_really_run() -> None:
    code, found = findings()
    assert code == 0
    assert found["torch"]["state"] == "ok"
    assert found["CPU kernels"]["state"] == "ok"
    assert "eager and compiled agree" in found["attention"]["detail"]


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    """No compiler on the PATH, and caches below a regular file, which stops even root."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    code, found = findings(
        PATH=str(tmp_path),
        TORCHINDUCTOR_CACHE_DIR=str(blocker / "inductor"),
        TRITON_CACHE_DIR=str(blocker / "triton"),
        TCPORT_CACHE_DIR=str(tmp_path / "cache"),
        CXX="",
    )
    assert code == 1
    assert found["C++ compiler"]["state"] == "fault"
    assert "no C++ compiler" in found["C++ compiler"]["detail"]
    assert found["CPU kernels"]["state"] == "note"
    assert "attention runs as plain PyTorch" in found["CPU kernels"]["detail"]
    for name in ("Inductor cache", "Triton cache"):
        assert found[name]["state"] == "fault"
        assert f"{blocker} is a file" in found[name]["detail"]
        assert "Set T" in found[name]["remedy"]


def test_the_report_is_readable_and_says_what_to_do(tmp_path: Path) -> None:
    done = doctor(PATH=str(tmp_path), CXX="")
    assert done.returncode == 1
    assert "no C++ compiler" in done.stdout
    assert "Install g++" in done.stdout


@pytest.mark.parametrize("check", ["device", "torch"])
def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    import tcport.doctor as module

    def broken(name: str) -> Any:
        raise OSError("no such device node")

    monkeypatch.setattr(module, "_CHECKS", ((check, broken),))
    assert module.examine() == [
        module.Finding(check, "fault", "the check itself failed: OSError: no such device node", "Report this.")
    ]
    assert not module.healthy(module.examine())
