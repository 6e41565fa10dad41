"""The tests that every module of checks of a kernel gets: its two tables, each run in a process of its own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from subprocess_results import run_in_subprocess


def kernel_tests(checks: ModuleType) -> tuple[Any, ...]:
    """Fixtures ``interpreted`` and ``compiled``, and the tests of both, for a test module to have under these names.

    Args:
        checks: its functions ``interpreted()`` and ``compiled()`` are tables, which ``python -m`` runs by these names.
    """
    module = checks.__name__

    @pytest.fixture(scope="module")
    def interpreted() -> dict[str, str]:
        return run_in_subprocess(module, "interpreted", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")

    @pytest.fixture(scope="module")
    def compiled() -> dict[str, str]:
        return run_in_subprocess(module, "compiled")

    @pytest.mark.parametrize("name", checks.interpreted())
    def test_agrees_with_the_definition(interpreted: dict[str, str], name: str) -> None:
        assert interpreted[name] == ""

    @pytest.mark.parametrize("name", checks.compiled())
    def test_compiles(compiled: dict[str, str], name: str) -> None:
        assert compiled[name] == ""

    return interpreted, compiled, test_agrees_with_the_definition, test_compiles
