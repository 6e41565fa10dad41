"""Families of GPUs and what Triton is told for each beyond the tile: the rows behind every Triton kernel.

A device takes the most specific row that fits it, by vendor first. The options are starting points from the vendors'
own guides; only NVIDIA's rows have been measured on hardware.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from tcport.device import DeviceProfile
from tcport.fingerprint import triton_version
from tcport.ir import AttentionSpec, TileConfig

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
    """One family.

    Attributes:
        arch: a pattern such as ``"sm_9*"``; None: any of the vendor's.
        flags: capabilities a device of the family must have.
        options: compile options for a spec and a tile.
    """

    vendor: str | None
    arch: str | None
    flags: tuple[str, ...] = ()
    options: Callable[[AttentionSpec, TileConfig], Options] = lambda spec, tile: {}


def _cdna(kpack: int) -> Callable[[AttentionSpec, TileConfig], Options]:
    """MFMA of 16 rows, as decode rarely fills 32; ``kpack`` 2 reads LDS in 16 bytes where the instruction is narrow.

    Two waves a SIMD hide the latency of page reads; a prefill tile keeps its accumulator in registers instead.
    """

    def options(spec: AttentionSpec, tile: TileConfig) -> Options:
        waves = 2 if spec.form == "decode" else 0
        return {"waves_per_eu": waves, "matrix_instr_nonkdim": 16, "kpack": kpack}

    return options


def _xe(grf_bytes: int) -> Callable[[AttentionSpec, TileConfig], Options]:
    """256 registers a thread where the accumulator alone fills half of the usual 128."""

    def options(spec: AttentionSpec, tile: TileConfig) -> Options:
        columns = max(16, 1 << (spec.head_dim_v - 1).bit_length())
        accumulator = 4 * tile.block_m * columns // tile.num_warps
        return {"grf_mode": "256"} if accumulator > 64 * grf_bytes else {}

    return options


TARGETS = (
    Target("nvidia", "sm_75"),
    Target("nvidia", "sm_80"),
    Target("nvidia", "sm_86"),
    Target("nvidia", "sm_89"),
    Target("nvidia", "sm_90*"),
    Target("nvidia", "sm_10?*"),
    Target("nvidia", "sm_12?*"),
    Target("amd", "gfx90a", options=_cdna(2)),
    Target("amd", "gfx942", options=_cdna(2)),
    # Its MFMA takes 16 bytes of K at once: kpack has nothing left to pack, and Triton refuses 2.
    Target("amd", "gfx950", options=_cdna(1)),
    Target("amd", "gfx11*"),
    Target("amd", "gfx12*"),
    Target("intel", "pvc", options=_xe(64)),
    Target("intel", "bmg", options=_xe(64)),
    Target("intel", "lnl", options=_xe(64)),
    Target("intel", "dg2", options=_xe(32)),
    # An architecture that came later: its vendor's compiler decides.
    Target("nvidia", None),
    Target("amd", None),
    Target("intel", None),
)


ANY_GPU = Target(None, None)
"""A device whose vendor no runtime told."""


def target_of(profile: DeviceProfile) -> Target:
    """The family of a device."""
    fitting = [
        target
        for target in TARGETS
        if target.vendor == profile.vendor
        and (target.arch is None or fnmatch.fnmatchcase(profile.arch or "", target.arch))
    ]
    return max(fitting, key=lambda target: target.arch is not None, default=ANY_GPU)


def refusal(target: Target, tile: TileConfig) -> str | None:
    """Why a tile is not for a family: its matrix instructions do not fill it, or its compiler is known to fail.

    Matrix instructions of AMD and Intel have 16 rows and columns, or divide 16. For AMD, Triton 3.6 builds no tile of
    four stages ("'tt.load' op operation destroyed but still has uses", seen for gfx90a, gfx942 and gfx1100); 3.8 does.
    """
    if target.vendor in ("amd", "intel") and (tile.block_m % 16 or tile.block_n % 16):
        return f"{tile.block_m}x{tile.block_n} is no multiple of the 16x16 matrix instruction"
    if target.vendor == "amd" and tile.num_stages > 3 and _triton() < (3, 8):
        return f"{tile.num_stages} stages: Triton {triton_version()} does not build them for AMD"
    return None


def _triton() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", triton_version())[:2]))
