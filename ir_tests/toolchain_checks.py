"""What breaks where compilers are missing, each for real; run by ``test_chain_compiled.py`` with an empty ``PATH``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from subprocess_results import report
from torch import Tensor
from triton.backends.compiler import GPUTarget

import tcport
from tcport.failures import cause_of
from tcport.kernels import reference
from tcport.kernels.offline import Launch, compile_launch

H200 = GPUTarget("cuda", 90, 32)


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def refused(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, 3)  # not a power of two
    tl.store(x + at, at)


def compile_kernel(kernel: object, block: int = 64) -> None:
    compile_launch(Launch(kernel, (1,), {"x": torch.empty(64, device="meta"), "n": 64, "BLOCK": block}, {}), H200)


def no_compiler_for_inductor() -> None:
    """The graph runs uncompiled, with the right result, and the report says why."""

    def attend(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return torch.relu(tcport.paged_attention(q, kc, vc, table, lens)) + 1

    args = (torch.randn(2, 4, 16), torch.randn(8, 4, 2, 16), torch.randn(8, 4, 2, 16))
    where = (torch.arange(8).reshape(2, 4).int(), torch.tensor([3, 16]))
    out = torch.compile(attend, backend="tcport")(*args, *where)
    want, _ = reference.paged_attention(*args, *where)
    torch.testing.assert_close(out, torch.relu(want) + 1, rtol=1e-5, atol=1e-5)
    last = tcport.last_report()
    assert last is not None
    assert [(f.node, f.cause) for f in last.graphs[0].fallbacks] == [("graph", "toolchain")]
    assert "runs uncompiled" in str(last)
    assert tcport.counters()["graphs left uncompiled"] == 1
    strict = torch.compile(attend, backend="tcport", options={"strict": True})
    assert "Drop the option 'strict' to run uncompiled" in str(raised(strict, *args, *where))


def no_compiler_for_a_launcher() -> None:
    from triton.runtime.build import compile_module_from_src

    assert cause_of(raised(compile_module_from_src, "int main() { return 0; }", "tcport_launcher")) == "toolchain"


def no_assembler() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, tool in vars(type(triton.knobs.nvidia)).items():
            if name.startswith("ptxas") and hasattr(tool, "default_path"):
                patch.setattr(tool, "default_path", "/nowhere/ptxas")
        error = raised(compile_kernel, double, 32)
    assert "ptxas" in str(error)
    assert cause_of(error) == "toolchain"


def no_cache_folder() -> None:
    with tempfile.NamedTemporaryFile() as blocker, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(Path(blocker.name) / "cache"))
        error = raised(compile_kernel, double, 128)
    assert isinstance(error, NotADirectoryError)
    assert cause_of(error) == "toolchain"


def refused_by_the_compiler() -> None:
    error = raised(compile_kernel, refused)
    assert "power of 2" in str(error)
    assert cause_of(error) == "build"


def raised(function: Callable[..., object], *args: object) -> Exception:
    """The exception a call ends with."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - it is the result
        return error
    raise AssertionError(f"{function} raised nothing")


if __name__ == "__main__":
    report(
        {
            "refused": refused_by_the_compiler,
            "no cache folder": no_cache_folder,
            "no assembler": no_assembler,
            "no C compiler for a launcher": no_compiler_for_a_launcher,
            "no C++ compiler": no_compiler_for_inductor,
        }
    )
