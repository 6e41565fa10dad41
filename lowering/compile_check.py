"""The compile check: before a tile goes first, it is compiled for the device, and what it takes is read back.

The model estimates, the compiler knows: a tile that needs more than the device has, or spills registers, steps down. It
happens where a chain is chosen, once for a kind of call: outcomes are kept on disk for the same kernel sources, tile,
target and compiler, and compilers run in processes of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import os

from tcport.device import DeviceProfile
from tcport.errors import KernelBuildError, OutOfResourcesError
from tcport.ir import AttentionSpec, TileConfig
from tcport.lowering.candidate import Rejection
from tcport.probes import is_present
from tcport.tiling import Ranking
from tcport.tiling.fit import fit

ENVIRONMENT_VARIABLE = "TCPORT_COMPILE_CHECK"


@dataclasses.dataclass(frozen=True)
class Checked:
    """Tiles in the order in which a chain shall try them.

    Attributes:
        footprint: what the first of them takes, in words, or why it is not known; empty where nothing was checked.
        rejections: the tiles that were compiled before it, each with what was wrong.
        why: why the first goes first, where it is not for its rank.
    """

    tiles: tuple[TileConfig, ...]
    footprint: str = ""
    rejections: tuple[Rejection, ...] = ()
    why: str = ""


def check_tiles(kernel: str, spec: AttentionSpec, profile: DeviceProfile, ranking: Ranking) -> Checked:
    """The tiles of a ranking behind the first one that compiles, fits the device and spills no registers.

    A device that is not there is left unchecked, and so is any under ``TCPORT_COMPILE_CHECK=0``: ``python -m tcport
    plan`` compiles for those. Where the compiler builds no tile at all, the chain finds out by itself, and why.

    Args:
        kernel: whose tiles they are.

    Raises:
        OutOfResourcesError: no tile fits.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE) == "0" or not is_present(profile):
        return Checked(ranking.configs)
    return _checked(kernel, spec, profile, ranking)


@functools.lru_cache(maxsize=1024)
def _checked(kernel: str, spec: AttentionSpec, profile: DeviceProfile, ranking: Ranking) -> Checked:
    try:
        accepted = fit(spec, profile, ranking)
    except OutOfResourcesError:
        raise
    except KernelBuildError as error:
        return Checked(ranking.configs, f"not checked: {error.cause}")
    steps = dict(accepted.steps)
    usable = [tile for tile in ranking.configs if tile != accepted.config and tile not in accepted.unusable]
    # Those that only spill stay in the chain, behind all that nothing is known against.
    tiles = (accepted.config, *sorted(usable, key=lambda tile: tile in steps))
    error, footprints = accepted.compiled.error, accepted.compiled.footprints
    footprint = f"not checked: {error}" if error else "; ".join(filter(None, [*map(str, footprints), accepted.verdict]))
    return Checked(tiles, footprint, tuple(Rejection(kernel, why, tile) for tile, why in steps.items()))
