"""Each family's rows compile to that family's matrix instruction, with that family's options."""

from __future__ import annotations

import pytest
import target_checks
from subprocess_results import run_in_subprocess


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    return run_in_subprocess("target_checks")


@pytest.mark.parametrize("name", target_checks.checks())
def test_the_family_s_instruction_is_used(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == ""
