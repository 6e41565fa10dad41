"""What an instruction set has, by compiler target: facts of the target itself, which no runtime call reports.

Limits and sizes of a device (shared memory, caches, units) are never in here: they come from its runtime.
"""

from __future__ import annotations

import re

from tcport.device.facts import Report

SOURCE = "instruction set of the target"


def read(arch: str | None) -> Report:
    """Facts of a target such as ``sm_90``, ``gfx942`` or ``bmg``; an unlisted target stays unknown."""
    if arch is None:
        return Report(SOURCE, unknown={"*": "the target is unknown"})
    if match := re.fullmatch(r"sm_(\d+)[af]?", arch):
        return _nvidia(arch, int(match[1]))
    family = next((facts for prefix, facts in _AMD.items() if arch.startswith(prefix)), None) or _INTEL.get(arch)
    if family is None:
        return Report(SOURCE, unknown={"*": f"{arch} is not a target tcport knows"})
    facts, flags = family
    return Report(SOURCE, facts, {}, flags)


def matrix_rate(arch: str | None) -> int | None:
    """Dense fp16 FLOP per clock of one compute unit with fp32 accumulation, where the target alone decides it.

    NVIDIA's sm_86, sm_89 and sm_120 are sold at full and at half rate under one target, so they have none here.
    AMD counts one unit as HIP does: a CU on CDNA, a WGP (two CUs) on RDNA. Sources: the vendors' peak numbers divided
    by units and clock (A100 312e12 / (108 * 1.41e9), H100 SXM 989e12 / (132 * 1.83e9), T4 65e12 / (40 * 1.59e9),
    MI250X 383e12 / (220 * 1.7e9), MI300X 1307e12 / (304 * 2.1e9), MI355X 2.5e15 / (256 * 2.4e9),
    RX 7900 XTX 123e12 / (48 * 2.5e9), RX 9070 XT 195e12 / (32 * 2.97e9)).
    """
    rates = {"sm_75": 1024, "sm_80": 2048, "sm_90": 4096, "gfx90a": 1024, "gfx942": 2048, "gfx950": 4096}
    rates |= {"gfx1100": 1024, "gfx1101": 1024, "gfx1151": 1024, "gfx1200": 2048, "gfx1201": 2048}
    return rates.get(arch or "")


def _nvidia(arch: str, number: int) -> Report:
    """CUDA C++ Programming Guide, technical specifications per compute capability; PTX ISA target notes."""
    if number < 70:
        return Report(SOURCE, unknown={"*": f"{arch} has no matrix instructions and Triton has no such target"})
    major = number // 10
    async_copy = "none" if number < 80 else "cp.async" if number < 90 else "tma"
    mma_atom = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}.get(major, "mma.sync")
    flags = {
        "bf16": number >= 80,
        "fp8": number >= 89,
        "tma": number >= 90,
        "cluster": number >= 90,
        "programmatic_launch": number >= 90,
    }
    return Report(SOURCE, {"mma_atom": mma_atom, "async_copy": async_copy, "max_registers_per_thread": 255}, {}, flags)


_NO_TMA = {"tma": False, "cluster": False, "programmatic_launch": False}

# LLVM's AMDGPU usage guide: vector registers a wave can address (CDNA2 and later: VGPRs and AGPRs together), matrix
# instructions, and the fp8 forms. Longest prefix first.
_AMD = {
    "gfx90a": (
        {"mma_atom": "mfma", "async_copy": "none", "max_registers_per_thread": 512},
        {"bf16": True, "fp8": False, **_NO_TMA},
    ),
    "gfx942": (
        {"mma_atom": "mfma", "async_copy": "buffer_load_lds", "max_registers_per_thread": 512},
        {"bf16": True, "fp8": True, "fp8_fnuz": True, **_NO_TMA},
    ),
    "gfx950": (
        {"mma_atom": "mfma", "async_copy": "buffer_load_lds", "max_registers_per_thread": 512},
        {"bf16": True, "fp8": True, "fp8_fnuz": False, **_NO_TMA},
    ),
    "gfx11": (
        {"mma_atom": "wmma", "async_copy": "none", "max_registers_per_thread": 256},
        {"bf16": True, "fp8": False, **_NO_TMA},
    ),
    "gfx120": (
        {"mma_atom": "wmma", "async_copy": "none", "max_registers_per_thread": 256},
        {"bf16": True, "fp8": True, "fp8_fnuz": False, **_NO_TMA},
    ),
    "gfx10": (
        {"mma_atom": "none", "async_copy": "none", "max_registers_per_thread": 256},
        {"bf16": False, "fp8": False, **_NO_TMA},
    ),
}

_INTEL = {
    target: ({"mma_atom": "dpas", "async_copy": "block_2d" if target != "dg2" else "none"}, {"bf16": True, **_NO_TMA})
    for target in ("dg2", "pvc", "lnl", "bmg")
}
