"""``import tcport`` on any machine: no driver, no CUDA context, no compiler, and a process that can still fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Loading one of these means a compiler or a driver was reached for.
NOT_AT_IMPORT = [
    "torch._inductor.compile_fx",
    "torch._inductor.graph",
    "torch._inductor.lowering",
    "torch._inductor.codecache",
    "torch._dynamo.eval_frame",
    "triton.runtime.driver",
    "triton.backends.nvidia.driver",
    "triton.backends.amd.driver",
    "cuda.bindings.driver",
    "cuda.bindings.runtime",
    "hip.hip",
    "pynvml",
    "transformers",
]


def python(source: str, **variables: str) -> str:
    """What a fresh interpreter prints that finds tcport in this checkout and nothing else changed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_compiler_and_no_driver() -> None:
    """Beyond what torch itself loads: it imports the CUDA bindings and NVML where they are installed."""
    source = "import sys, torch; before = set(sys.modules); import tcport; print(*(set(sys.modules) - before))"
    loaded = python(source).split()
    assert "tcport" in loaded
    assert set(loaded) & set(NOT_AT_IMPORT) == set()


def test_import_initialises_no_cuda() -> None:
    assert python("import torch, tcport; print(torch.cuda.is_initialized())") == "False\n"


def test_import_opens_no_vendor_library() -> None:
    """Read from the process map, so that a library opened through ctypes is seen as well."""
    source = (
        "import torch\n"
        "before = open('/proc/self/maps').read()\n"
        "import tcport\n"
        "after = open('/proc/self/maps').read()\n"
        "names = ['libcuda.so', 'libnvidia-ml', 'libamdhip64', 'libze_loader', 'libtriton']\n"
        "print([n for n in names if n in after and n not in before])"
    )
    if not Path("/proc/self/maps").exists():
        source = "import tcport; print([])"
    assert python(source) == "[]\n"


def test_import_without_a_compiler_on_the_path(tmp_path: Path) -> None:
    assert python("import tcport; print(tcport.__version__)", PATH=str(tmp_path), CC="", CXX="") == "0.1.0\n"


def test_import_without_a_home_that_can_be_written(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert python("import tcport; print('imported')", HOME=str(blocker / "home")) == "imported\n"


FORK = """
import os, torch, tcport
child = os.fork()
if child == 0:
    x = torch.arange(4, device={device!r})
    os._exit(0 if x.sum().item() == 6 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_imported_can_fork() -> None:
    assert python(FORK.format(device="cpu")) == "0\n"


@pytest.mark.gpu
def test_a_forked_child_can_use_cuda() -> None:
    assert python(FORK.format(device="cuda")) == "0\n"
