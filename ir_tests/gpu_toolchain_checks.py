"""A GPU without working compilers, each check in a process of its own; run by ``test_chain_gpu.py``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.mkdtemp(prefix="tcport-toolchain-"))
# Set before anything reads them: nothing that was compiled before may help.
os.environ |= {
    "TRITON_CACHE_DIR": str(FOLDER / "triton"),
    "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),
    "TCPORT_PROBES": "0",
}

import torch  # noqa: E402
import triton  # noqa: E402
from subprocess_results import report  # noqa: E402
from test_chain_gpu import batch, check, decode  # noqa: E402

import tcport  # noqa: E402
from tcport import chain, history  # noqa: E402
from tcport.bundle import use_bundle  # noqa: E402
from tcport.lowering.operators import KV_WRITE, PAGED_ATTENTION  # noqa: E402

SPECS = [{"num_q_heads": 8, "num_kv_heads": 2, "dim_qk": 64, "dtype": "float16"}]


def no_compiler() -> None:
    check(decode, batch())
    check(torch.compile(decode, backend="tcport"), batch())
    # Where Triton's and Inductor's own launchers need no C compiler, nothing fails; where they do, it is said why.
    assert {f.cause for f in history.fallbacks()} <= {"toolchain"}, history.fallbacks()
    print([str(f)[:200] for f in history.fallbacks()], tcport.last_report(), file=sys.stderr)


def no_assembler() -> None:
    for name, tool in vars(type(triton.knobs.nvidia)).items():
        if name.startswith("ptxas") and hasattr(tool, "default_path"):
            tool.default_path = "/nowhere/ptxas"
    os.environ.pop("TRITON_PTXAS_PATH", None)
    check(decode, batch())
    assert {f.cause for f in history.fallbacks()} == {"toolchain"}, history.fallbacks()
    assert history.fallbacks()[-1].to == "torch_attention [torch]"
    check(torch.compile(decode, backend="tcport"), batch())
    # Inductor may find an assembler of torch's own; where it does not, the graph runs uncompiled and says so.
    last = tcport.last_report()
    assert last is not None
    assert ("runs uncompiled" in str(last)) == (tcport.counters().get("graphs left uncompiled", 0) == 1), last


def bundle() -> None:
    """A bundle that ``TCPORT_TEST_BUNDLE`` names was built on another machine; else it is built here first."""
    folder = os.environ.get("TCPORT_TEST_BUNDLE") or _build()
    start = time.perf_counter()
    check(decode, batch())
    torch.cuda.synchronize()
    cold = time.perf_counter() - start

    def never(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot find ptxas")

    triton.compile = triton.compiler.compile = triton.runtime.jit.JITFunction.run = never
    loaded = use_bundle(folder)
    steps = len(history.fallbacks())
    args = batch()
    start = time.perf_counter()

    def forced(q: Any, k: Any, v: Any, kc: Any, vc: Any, table: Any, lens: Any, slots: Any) -> Any:
        chain.run(KV_WRITE, KV_WRITE.call(k, v, kc, vc, slots), kernel="bundle_write", strict=True)
        return chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(q, kc, vc, table, lens), kernel="bundle_attention")[0]

    check(forced, args)
    warm = time.perf_counter() - start
    for size in (1, 3, 64):
        check(forced, batch(size))
    assert len(history.fallbacks()) == steps  # nothing was compiled, and nothing refused
    assert tcport.counters()["bundle kernels loaded"] >= 2
    print(f"first call {1000 * warm:.1f} ms from a bundle, {1000 * cold:.0f} ms cold", loaded.compiler, file=sys.stderr)
    # With the compiler broken, the chain comes to the bundle by itself, compiled code included.
    check(decode, batch())
    assert history.fallbacks()[-1].to.startswith("bundle_attention [blob]"), history.fallbacks()
    options = {"kernel": "bundle_attention"}
    check(torch.compile(tcport_attention, backend="tcport", options=options), batch())
    assert tcport.last_report().nodes[-1].tier == "blob"  # type: ignore[union-attr]


def tcport_attention(q: Any, k: Any, v: Any, kc: Any, vc: Any, table: Any, lens: Any, slots: Any) -> Any:
    tcport.kv_write(k, v, kc, vc, slots)
    return tcport.paged_attention(q, kc, vc, table, lens)


def _build() -> str:
    from tcport.bundle.build import build_bundle
    from tcport.bundle.command import read_specs
    from tcport.device import device_profile

    (FOLDER / "specs.json").write_text(json.dumps(SPECS))
    build_bundle(read_specs(FOLDER / "specs.json"), device_profile("cuda"), FOLDER / "bundle", tiles=1)
    return str(FOLDER / "bundle")


if __name__ == "__main__":
    checks = {"no compiler": no_compiler, "no assembler": no_assembler, "bundle": bundle}
    report({sys.argv[1]: checks[sys.argv[1]]})
