"""What every test runs under: no GPU test without a GPU, empty compile caches, fixed seeds and examples."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Read once, when torch loads its OpenMP. Threads that spin at a barrier starve each other as soon as another process
# wants the cores: a step of the example took 5 s instead of 0.15 s on a busy machine with two.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Point Inductor and Triton at caches of this session, before either is imported.

    An artefact left by another checkout would make a test pass that should compile and fail.
    """
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
    root = Path(tempfile.mkdtemp(prefix="tcport-tests-"))
    for name in CACHE_VARIABLES:
        os.environ[name] = str(root / name.lower())
    os.environ.setdefault("TCPORT_COMPILE_CHECK", "0")  # on a GPU it would compile each test's kernels once more
    config.add_cleanup(lambda: shutil.rmtree(root, ignore_errors=True))
    if not config.pluginmanager.has_plugin("tcport"):  # an installed tcport has brought it as an entry point
        config.pluginmanager.import_plugin("tcport.testing.plugin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs a CUDA GPU on a machine that has none; refuse names that differ from process to process."""
    import torch

    nameless = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if nameless:
        raise pytest.UsageError(f"{nameless[0]} is named by an address, which differs in every process: give it ids.")

    if torch.cuda.is_available():
        return
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _seeded_and_uncompiled() -> Iterator[None]:
    """The same random tensors in every run; no compiled function and no failed kernel left over for the next test."""
    import torch

    torch.manual_seed(0)
    yield
    if "tcport.quarantine" in sys.modules:
        sys.modules["tcport.quarantine"].clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
