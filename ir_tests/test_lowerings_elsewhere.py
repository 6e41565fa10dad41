"""``check_lowering(profile=...)``: kernels for a device that is not here, compared in Triton's interpreter."""

from __future__ import annotations

import interpreted_lowering_checks as checks
import pytest
from subprocess_results import run_in_subprocess

from tcport.device.catalog import catalogue_profile
from tcport.errors import ArgumentError
from tcport.testing import check_lowering


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return run_in_subprocess("interpreted_lowering_checks", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("name", checks.interpreted())
def test_numbers(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


def test_kernels_that_are_not_interpreted_are_refused() -> None:
    said = r"kernel plus_kernel cannot be compiled for the CPU. Set TRITON_INTERPRET=1 before Triton is imported"
    with checks.registered(), pytest.raises(ArgumentError, match=said):
        check_lowering(checks.OP, "right", profile=catalogue_profile("mi300x"))
