"""The first call where everything has to be compiled, and where a bundle was: ``python -m tcport.bench.first_call``.

Each row is a process of its own, printed when it ends. What is timed begins with torch and tcport imported, the device
awake and the inputs on it, and ends with the result. ``cold`` starts with empty caches and default settings, ``warm``
with those that cold left, ``bundle`` with empty ones and kernels that were compiled ahead. Results are checked against
the reference.

What a cold GPU compiles are the kernels of the call, with those of the compile check, and the self-tests of these
kernels. ``TCPORT_PROBES=0`` leaves the self-tests out, ``TCPORT_COMPILE_CHECK=0`` the check.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tcport import chain, eager, history, ops  # noqa: F401  (eager binds the operators)
from tcport.bundle import build
from tcport.device import device_profile
from tcport.kernels import reference
from tcport.lowering.operators import KV_WRITE, PAGED_ATTENTION
from tcport.tiling.plan import plain_spec

SIZES: dict[str, Any] = {
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "dim_qk": 128,
    "dim_v": 128,
    "page": 16,
    "batch": 8,
    "context": 2048,
}
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TCPORT_CACHE_DIR")
WHAT = ("operators", "graph")
COMPILED = (".cubin", ".hsaco", ".so", ".o", ".spv")
"""Endings of the files that compilers leave in the caches."""


def main() -> None:
    """Build a bundle, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    options.add_argument("--bundle", type=Path, help="a bundle with these kernels; default: one is built first")
    options.add_argument("--what", nargs="+", default=WHAT, choices=WHAT, help="which calls to measure; default: both")
    options.add_argument("--worker", nargs=2, metavar=("WHAT", "WAY"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        print(json.dumps(first_call(given.device, *given.worker)))
        return
    with tempfile.TemporaryDirectory(prefix="tcport-first-call-") as folder:
        bundle = given.bundle or build_bundle(given.device, Path(folder, "bundle"))
        print(f"{device_profile(given.device).name}, torch {torch.__version__}, {os.cpu_count()} CPUs, bundle {bundle}")
        for what in given.what:
            for way in ("cold", "warm", "bundle"):
                caches = Path(folder, what, "bundle" if way == "bundle" else "cold")
                before = set(compiled_files(caches))
                told = in_a_process(given.device, what, way, caches, bundle if way == "bundle" else None)
                files = set(compiled_files(caches)) - before
                print(
                    f"{what:9} {way:6} {told['seconds']:7.2f} s, {told['kernels']}; compiled {words(files)}",
                    flush=True,
                )


def build_bundle(device: str, folder: Path) -> Path:
    """A bundle with the kernels of the measured call."""
    if device == "cpu":
        build.build_cpu_bundle(folder)
    else:
        spec = plain_spec(**SIZES, tokens=None, dtype="bfloat16", kv_dtype="bfloat16")
        build.build_bundle([spec], device_profile(device), folder, tiles=1)
    return folder


def in_a_process(device: str, what: str, way: str, caches: Path, bundle: Path | None) -> dict[str, Any]:
    """What :func:`first_call` returns in a process with these caches and, if any, this bundle."""
    environment = {name: value for name, value in os.environ.items() if name != "TCPORT_BUNDLE"}
    environment |= {name: str(caches / name.lower()) for name in CACHES}
    environment |= {"TCPORT_BUNDLE": str(bundle)} if bundle else {}
    command = [sys.executable, "-m", "tcport.bench.first_call", "--device", device, "--worker", what, way]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_call(device: str, what: str, way: str) -> dict[str, Any]:
    """Write new tokens and attend, once, with the operators or as a compiled graph.

    Returns:
        ``seconds``, and the ``kernels`` of the graph, with any step down a chain.

    Raises:
        AssertionError: the result is wrong.
    """
    args = inputs(device)
    want = expected(*args)
    blob = way == "bundle" and device != "cpu"  # the CPU's kernels are one library, in a bundle or not
    run = (_precompiled if blob else _attend) if what == "operators" else _graph(blob)
    _wait(device)
    start = time.perf_counter()
    with history.collected() as report:
        out = run(*args)
        _wait(device)
    seconds = time.perf_counter() - start
    torch.testing.assert_close(out.cpu().float(), want, rtol=0, atol=2e-2)
    kernels = "; ".join(node.kernel for node in report.nodes)
    steps = "".join(f"; {step}" for step in history.fallbacks())
    return {"seconds": seconds, "kernels": (kernels or ("a cached graph" if report.graphs else "no graph")) + steps}


def inputs(device: str) -> list[torch.Tensor]:
    """Query, key, value, caches, block table, lengths and slots."""
    torch.manual_seed(0)
    batch, pages = SIZES["batch"], SIZES["context"] // SIZES["page"]
    table = torch.randperm(batch * pages).reshape(batch, pages).int()
    lens = torch.randint(1, SIZES["context"] + 1, (batch,)).int()
    last = lens.long() - 1
    slots = table.long().gather(1, (last // SIZES["page"])[:, None])[:, 0] * SIZES["page"] + last % SIZES["page"]
    heads = (SIZES["num_q_heads"], SIZES["num_kv_heads"], SIZES["num_kv_heads"])
    new = [torch.randn(batch, count, SIZES["dim_qk"]).bfloat16() for count in heads]
    cache = (batch * pages, SIZES["page"], SIZES["num_kv_heads"], SIZES["dim_qk"])
    return [each.to(device) for each in (*new, *(torch.randn(cache).bfloat16() for _ in "kv"), table, lens, slots)]


def expected(*args: torch.Tensor) -> torch.Tensor:
    """The result by the reference, on copies on the CPU."""
    q, k, v, kc, vc, table, lens, slots = (each.cpu().clone() for each in args)
    reference.kv_write(k, v, kc, vc, slots)
    return reference.paged_attention(q, kc, vc, table, lens)[0].float()


def compiled_files(folder: Path) -> list[str]:
    """The files that compilers have left below a folder, by their paths within it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in COMPILED)


def _attend(q: Any, k: Any, v: Any, kc: Any, vc: Any, table: Any, lens: Any, slots: Any) -> Any:
    ops.kv_write(k, v, kc, vc, slots)
    return ops.paged_attention(q, kc, vc, table, lens)


def _precompiled(q: Any, k: Any, v: Any, kc: Any, vc: Any, table: Any, lens: Any, slots: Any) -> Any:
    chain.run(KV_WRITE, KV_WRITE.call(k, v, kc, vc, slots), kernel="bundle_write", strict=True)
    call = PAGED_ATTENTION.call(q, kc, vc, table, lens)
    return chain.run(PAGED_ATTENTION, call, kernel="bundle_attention", strict=True)[0]


def _graph(blob: bool) -> Callable[..., Any]:
    options = {"kernel": "bundle_attention", "strict": True} if blob else {}
    return torch.compile(_attend, backend="tcport", fullgraph=True, options=options)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def words(files: Iterable[str]) -> str:
    """How many files of each kind there are, those of Triton's kernels by the kernel's name."""
    names = Counter(Path(file).name if Path(file).suffix != ".so" else ".so" for file in files)
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items())) or "nothing"


if __name__ == "__main__":
    main()
