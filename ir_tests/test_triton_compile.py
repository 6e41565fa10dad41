"""The Triton kernels compile for GPUs that are not here, and their shared memory fits those."""

from __future__ import annotations

import compile_checks
import pytest
from subprocess_results import run_in_subprocess


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    return run_in_subprocess("compile_checks")


@pytest.mark.parametrize("name", compile_checks.checks())
def test_compiles_and_fits(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == ""
