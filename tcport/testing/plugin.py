"""A pytest plugin: the functions of :mod:`tcport.testing` as fixtures, each with what it changed undone after the test.

It is loaded by its entry point once tcport is installed, and imports neither torch nor tcport until a fixture is used.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def tcport_capture() -> Callable[..., Any]:
    """:func:`tcport.testing.capture`."""
    from tcport.testing import capture

    return capture


@pytest.fixture
def tcport_assert_equivalent() -> Callable[..., Any]:
    """:func:`tcport.testing.assert_equivalent`."""
    from tcport.testing import assert_equivalent

    return assert_equivalent


@pytest.fixture
def tcport_register_pass() -> Iterator[Callable[..., None]]:
    """Registers a pass for the length of the test: ``tcport_register_pass(my_pass, name="mine")``."""
    from tcport.graph_pass import registered_pass

    with contextlib.ExitStack() as registered:

        def register(run: Any, **options: Any) -> None:
            registered.enter_context(registered_pass(run, **options))

        yield register


@pytest.fixture
def tcport_inject_failure() -> Iterator[Callable[..., None]]:
    """Lets a kernel fail for the rest of the test: ``tcport_inject_failure("triton_decode")``."""
    from tcport.testing import inject_failure

    with contextlib.ExitStack() as injected:

        def inject(kernel: str, error: Exception | None = None) -> None:
            injected.enter_context(inject_failure(kernel, error))

        yield inject


@pytest.fixture
def tcport_compiles() -> Iterator[Any]:
    """The number of graphs compiled since the test began, to compare with: ``assert tcport_compiles <= 2``."""
    import torch

    from tcport.testing import count_compiles

    torch.compiler.reset()
    with count_compiles() as compiles:
        yield compiles
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
