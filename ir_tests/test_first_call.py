"""A first call with a bundle compiles nothing: calls of compilers are counted, and what they leave in the caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.utils._triton
from torch._inductor import config
from torch._inductor.runtime import autotune_cache

from tcport._inductor import compile as inductor_compile
from tcport.bench.first_call import build_bundle, compiled_files, in_a_process, words

COMPILERS = ("CC", "CXX", "TRITON_PTXAS_PATH")


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        ("cpu", "cpp_write+cpp_attention"),
        pytest.param("cuda", "bundle_write+bundle_attention", marks=pytest.mark.gpu),
    ],
)
def test_with_a_bundle_nothing_is_compiled(
    device: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators and a graph of one layer, each in a process with empty caches; results are checked there."""
    bundle = build_bundle(device, tmp_path / "bundle")
    for variable in COMPILERS:
        monkeypatch.setenv(variable, str(no_compiler(tmp_path)))
    for what, told in (("operators", "no graph"), ("graph", kernels)):
        caches = tmp_path / what
        assert in_a_process(device, what, "bundle", caches, bundle)["kernels"] == told
        assert compiled_files(caches) == []
        assert compiler_calls(tmp_path) == []


def no_compiler(folder: Path) -> Path:
    """A compiler that tells its version, and fails where it is asked to compile; it writes down its calls."""
    compiler = folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in --version|-v) echo "g++ 12.2.0"; exit 0;; esac\necho "$@" >> {folder}/calls\nexit 1\n'
    )
    compiler.chmod(0o755)
    return compiler


def compiler_calls(folder: Path) -> list[str]:
    calls = folder / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


def test_what_compilers_leave_is_listed(tmp_path: Path) -> None:
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    for name in ("attend.cubin", "attend.ttir", "launcher.so", "abc/attend.cubin"):
        (tmp_path / "triton" / name).write_bytes(b"")
    left = compiled_files(tmp_path)
    assert left == ["triton/abc/attend.cubin", "triton/attend.cubin", "triton/launcher.so"]
    assert words(left) == "1 .so, 2 attend.cubin"
    assert words([]) == "nothing"


def test_a_graph_asks_tritons_driver_for_a_remote_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is a C extension that is compiled when it is first asked, even where no kernel of Triton's runs."""
    asked: list[str] = []

    def key_of_driver() -> str:
        asked.append("driver")
        return "KEY"

    def compiled_sum() -> list[float]:
        torch.compiler.reset()
        with config.patch(force_disable_caches=True):
            return torch.compile(lambda x: x + 1, backend="tcport")(torch.tensor([1.0, 2.0])).tolist()

    for module in (autotune_cache, inductor_compile):
        monkeypatch.setattr(module, "has_triton", lambda: True)
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", key_of_driver)
    assert compiled_sum() == [2.0, 3.0]
    assert asked == []
    with config.patch(autotune_remote_cache=True):
        assert compiled_sum() == [2.0, 3.0]
    assert asked == ["driver"]
