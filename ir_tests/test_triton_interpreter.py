"""The Triton kernels against the reference, in Triton's interpreter: every option, no GPU."""

from __future__ import annotations

import interpreter_checks
import pytest
from subprocess_results import run_in_subprocess


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    return run_in_subprocess("interpreter_checks", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("name", interpreter_checks.checks())
def test_agrees_with_the_reference(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == ""
