"""A first call with a bundle compiles nothing: what compilers leave in the caches is counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tcport.bench.first_call import build_bundle, compiled_files, in_a_process


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        ("cpu", "cpp_write+cpp_attention"),
        pytest.param("cuda", "bundle_write+bundle_attention", marks=pytest.mark.gpu),
    ],
)
def test_with_a_bundle_nothing_is_compiled(device: str, kernels: str, tmp_path: Path) -> None:
    """Operators and a graph of one layer, each in a process with empty caches; results are checked there."""
    bundle = build_bundle(device, tmp_path / "bundle")
    for what, told in (("operators", "no graph"), ("graph", kernels)):
        caches = tmp_path / what
        assert in_a_process(device, what, "bundle", caches, bundle)["kernels"] == told
        assert compiled_files(caches) == Counter()


def test_what_compilers_leave_is_counted(tmp_path: Path) -> None:
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    for name in ("attend.cubin", "attend.ttir", "launcher.so", "abc/other.cubin"):
        (tmp_path / "triton" / name).write_bytes(b"")
    assert compiled_files(tmp_path) == {".cubin": 2, ".so": 1}
