"""The README is true: its code runs and finds what it promises, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tcport.kernels import reference

ROOT = Path(__file__).resolve().parents[1]
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}


def test_the_code_runs_and_finds_attention(capsys: Any) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT["README.md"], flags=re.DOTALL):
        exec(block, names)
    expected, _ = reference.paged_attention(
        *(names[name] for name in ("query", "k_cache", "v_cache", "block_table", "seq_lens"))
    )
    torch.testing.assert_close(names["out"], expected, rtol=1e-4, atol=1e-4)
    printed = capsys.readouterr().out
    assert "found sdpa: paged_attention" in printed
    assert "found writes: kv_write" in printed


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for name, text in TEXT.items():
        named = set(re.findall(r"\bmake ([a-z][\w-]*)", text))
        assert named, name
        assert named <= targets, name


def test_the_files_exist() -> None:
    for name, text in TEXT.items():
        paths = set(re.findall(r"`([\w./-]+\.(?:py|md|txt|toml))`", text)) - {"prompts.txt"}
        assert paths, name
        assert {path for path in paths if not (ROOT / path).exists()} == set(), name
