"""Tiles of the Hopper kernel: 128 rows in two groups of four warps, each group's products one wgmma high."""

from __future__ import annotations

import functools

from sympy import Integer, Max

from tcport.device.profile import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import AttentionSpec, TileConfig
from tcport.kernels.hopper_prefill import BLOCK_M, WARPS, registers
from tcport.tiling.constraints import Constraint
from tcport.tiling.formula import Formula, size
from tcport.tiling.limits import limits_of
from tcport.tiling.optimizer import Ranking

_BN, _STAGES, _DIM = size("block_n"), size("stages"), size("dim")

# A result passes through shared memory on its way to whole rows, one group's at a time; the last bytes are barriers and
# what is told of a block.
_SHARED = Formula(
    "shared memory of a CTA",
    BLOCK_M * _DIM * 2 + 2 * _STAGES * _BN * _DIM * 2 + Max(BLOCK_M * _DIM, 16384) + 768,
    "bytes",
)
# Two groups of four warps, and four for the one that fetches: registers are dealt out to four warps at a time.
_THREADS = Formula("threads of a CTA", Integer(3 * WARPS * 32))
# A thread of a group holds half a row's share of logits and result, and the weights of two tiles at 16 bits.
_REGISTERS = Formula("registers of a multiplying thread", 16 + _BN / 2 + _DIM / 2 + 2 * _BN / 4)


def rank_hopper_tiles(spec: AttentionSpec, profile: DeviceProfile) -> Ranking:
    """Tiles that fit, widest first: a wider tile meets fewer barriers per key.

    Four buffers where they fit, else two: with 64 dims, four took 4% less time than two on an H200.

    Raises:
        NoTileError: when no tile fits.
    """
    return hopper_tiles_of(spec.head_dim_qk, profile)


@functools.lru_cache(maxsize=256)
def hopper_tiles_of(head_dim: int, profile: DeviceProfile) -> Ranking:
    """As :func:`rank_hopper_tiles`, by all that it looks at: the spec of a call takes longer to make than to rank."""
    legal, rejected = [], []
    limits = limits_of(profile)
    checks = (
        Constraint(_SHARED, limits.shared_per_cta),
        Constraint(_THREADS, limits.threads_per_cta),
        Constraint(_REGISTERS, min(registers(head_dim)[0], limits.registers_per_thread)),
    )
    for block_n in (128, 64):
        for stages in (4, 2):
            tile = TileConfig(BLOCK_M, block_n, WARPS, stages)
            values = {"block_n": block_n, "stages": stages, "dim": head_dim}
            broken = next((check for check in checks if not check.holds(values)), None)
            if broken is None:
                legal.append(tile)
            else:
                rejected.append((tile, broken.reason(values)))
    if not legal:
        raise NoTileError(f"No tile fits; of {rejected[-1][0]}, {rejected[-1][1]}.", "The plain kernel takes the call.")
    return Ranking("hopper_prefill", tuple(legal), tuple(rejected), notes=limits.assumed)
