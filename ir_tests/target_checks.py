"""What the rows of the registry compile to, by target; run by ``test_targets_compiled.py`` in a process of its own."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from subprocess_results import report
from test_targets import device, spec

# The matrix instruction that the vendor documents for the family: PTX ISA, CDNA and RDNA ISA guides. Hopper's works on
# 64 rows, so a decode tile of 16 takes the one of Ampere there.
INSTRUCTIONS = {
    ("nvidia", "sm_80", "decode"): r"mma\.sync",
    ("nvidia", "sm_89", "varlen"): r"mma\.sync",
    ("nvidia", "sm_90", "decode"): r"mma\.sync",
    ("nvidia", "sm_90", "varlen"): r"(?s)(?=.*cp\.async\.bulk\.tensor).*wgmma\.mma_async",
    ("nvidia", "sm_120", "varlen"): r"mma\.sync",
    ("amd", "gfx90a", "decode"): r"v_mfma_f32_16x16x16",
    ("amd", "gfx942", "varlen"): r"v_mfma_f32_16x16x16",
    ("amd", "gfx950", "decode"): r"v_mfma_f32_16x16x32",
    ("amd", "gfx1100", "decode"): r"v_wmma_f32_16x16x16",
    ("amd", "gfx1201", "varlen"): r"v_wmma_f32_16x16x16",
}


def checks() -> dict[str, Callable[[], None]]:
    return {
        **{" ".join(row): functools.partial(uses, *row) for row in INSTRUCTIONS},
        "nvidia sm_90 softmax under products": softmax_under_products,
    }


def uses(vendor: str, arch: str, form: str) -> None:
    """The best candidate's attention kernel has the family's matrix instruction, and its compile options hold."""
    compiled, options = best(vendor, arch, form)
    assembly = compiled.asm["ptx" if vendor == "nvidia" else "amdgcn"]
    wanted = INSTRUCTIONS[vendor, arch, form]
    others = sorted(set(re.findall(r"wgmma\.\w+|mma\.sync\.[\w.]+|v_w?mfma\w*|v_wmma\w*", assembly)))
    assert re.search(wanted, assembly), others
    for name, value in options.items():
        assert getattr(compiled.metadata, name) == value, f"{name} is {getattr(compiled.metadata, name)}, not {value}"
    if options.get("waves_per_eu"):
        assert f'"amdgpu-waves-per-eu"="{options["waves_per_eu"]}' in compiled.asm["llir"]


def softmax_under_products() -> None:
    """In the loop of the Hopper kernel all powers of a tile stand before the wait for the products with the values.

    A thread has 64 of a tile's 64 x 128 logits, and a rescale of two rows. The assembler is free to move them, and has.
    """
    compiled, _ = best("nvidia", "sm_90", "varlen")
    marks = re.findall(r"MUFU\.EX2|DEPBAR\.LE gsb0, 0x[01]|HGMMA|LDL|STL", compiled.asm["sass"])
    under = re.findall(r"HGMMA DEPBAR\.LE gsb0, 0x1 ((?:MUFU\.EX2 )+)(?=DEPBAR\.LE gsb0, 0x0)", " ".join(marks))
    # One loop for each group of warps; disassemblers of some Tritons show the first only.
    assert [len(powers.split()) for powers in under] in ([66], [66, 66]), marks


def best(vendor: str, arch: str, form: str) -> tuple[Any, dict[str, Any]]:
    from triton.backends.compiler import GPUTarget

    from tcport.device import catalogue_profile
    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting
    from tcport.lowering.registry import select
    from tcport.tiling.example import attention_call
    from tcport.tiling.footprint import compile_target

    profile = catalogue_profile("h200") if arch == "sm_90" else device(vendor, arch)
    target = compile_target(profile)
    assert target is not None
    wanted = spec(form) if form == "decode" else dataclasses.replace(spec(form), num_tokens=4096)
    candidate = select("paged_attention", wanted, profile).candidates[0]
    with targeting(GPUTarget(*target)):
        launch = record(lambda call, launch: candidate.run(call, launch), attention_call(wanted))[0]
    return compile_launch(launch, GPUTarget(*target)), dict(candidate.options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    report({name: check for name, check in checks().items() if not wanted or name in wanted})
