"""The process that compiles kernels for a target: ``python -m tcport.tiling.compile_worker`` < requests > footprints.

A process of its own, because a compiler may abort on a tile it cannot handle, and because a process whose Triton
interprets cannot compile. One JSON request per line in, one JSON answer per line out, in order.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from tcport.kernels.offline import Launch, compile_ahead, compile_launch, record
from tcport.kernels.target import targeting
from tcport.tiling.example import attention_call
from tcport.tiling.wire import config_of, spec_of


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            target = GPUTarget(*request["target"])
            answer = {"launches": [_compile(launch, target) for launch in _launches(request, target)]}
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this request's answer
            answer = {"error": f"{type(error).__name__}: {_first_line(error)}"}
        print(f"\n{json.dumps(answer)}", flush=True)  # a line of its own, whatever a compiler printed before


def _launches(request: dict[str, Any], target: GPUTarget) -> list[Launch]:
    module, name = request["entry"].split(":")
    entry = getattr(importlib.import_module(module), name)
    with targeting(target):
        return record(entry, attention_call(spec_of(request["spec"])), config_of(request["config"]))


def _compile(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    # By the JIT, so that the first call finds it compiled. HIP's JIT looks at how large the memory is that a call is
    # given, which says nothing where that is an example's.
    compiled = (compile_ahead if target.backend == "cuda" else compile_launch)(launch, target)
    read = _nvidia_resources if target.backend == "cuda" else _amd_resources
    return {
        "kernel": compiled.metadata.name,
        "shared": compiled.metadata.shared,
        "threads": compiled.metadata.num_warps * target.warp_size,
        **read(compiled),
    }


def _nvidia_resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread and bytes of its stack (spills and local arrays), from the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", cubin.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    return {"registers": _number(r"REG:(\d+)", text), "spill": _number(r"STACK:(\d+)", text)}


def _amd_resources(compiled: Any) -> dict[str, int]:
    """Vector registers (with accumulation registers where the target has one pool) and spilled bytes per lane."""
    text = compiled.asm["amdgcn"]
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
        "spill": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has no match for {pattern}")
    return int(found[1])


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


if __name__ == "__main__":
    main()
