"""The process that compiles a bundle's kernels: ``python -m tcport.bundle.build_worker`` < requests > answers.

One JSON request per line in, one JSON answer per line out. A process of its own for the reasons that
:mod:`tcport.tiling.compile_worker` is one.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import sys
from typing import Any

from triton.backends.compiler import GPUTarget

from tcport.bundle.example import example_call
from tcport.kernels.offline import Launch, compile_launch, record, specialise
from tcport.kernels.target import targeting
from tcport.tiling.wire import config_of

_BINARIES = {"cuda": "cubin", "hip": "hsaco"}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"entries": build(request)}
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this request's answer
            text = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {text[0] if text else 'no message'}"}
        print(f"\n{json.dumps(answer)}", flush=True)  # a line of its own, whatever a compiler printed before


def build(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything one call launches, each kernel twice: for aligned arguments, and for any."""
    module, name = request["entry"].split(":")
    entry = getattr(importlib.import_module(module), name)
    config = config_of(request["config"])
    options = request["options"]
    call = example_call(request["op"], request["spec"], request["index_dtype"])
    target = GPUTarget(*request["target"])
    with targeting(target):
        launches = record(entry, call, config=config)
    return [
        _compiled(Launch(x.kernel, x.grid, x.arguments, {**x.options, **options}), target, aligned)
        for x in launches
        for aligned in (True, False)
    ]


def _compiled(launch: Launch, target: GPUTarget, aligned: bool) -> dict[str, Any]:
    known = specialise(launch, aligned=aligned)
    compiled = compile_launch(launch, target, known)
    metadata = compiled.metadata
    # Triton 3.6 and 3.7 give no kernel for AMD global scratch, and do not name it.
    if getattr(metadata, "global_scratch_size", 0) or metadata.profile_scratch_size:
        raise ValueError("the kernel needs scratch memory of the launcher's")
    visible = sum(kind != "constexpr" for kind in known.signature.values())
    parameters = _parameters(compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"])
    return {
        "function": launch.kernel.__name__,
        "symbol": metadata.name,
        "signature": known.signature,
        "constants": known.constants,
        "aligned": known.aligned,
        "hidden": parameters - visible,
        "shared": metadata.shared,
        "threads": metadata.num_warps * target.warp_size,
        "binary": base64.b64encode(compiled.asm[_BINARIES[target.backend]]).decode(),
    }


def _parameters(assembly: str) -> int:
    """Parameters of the one kernel in PTX or AMD assembly, those that the compiler adds included."""
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", assembly, re.DOTALL)
    if entry:
        return len(re.findall(r"\.param", entry[1]))
    return len(re.findall(r"\.value_kind:\s+(?:global_buffer|by_value)", assembly))


if __name__ == "__main__":
    main()
