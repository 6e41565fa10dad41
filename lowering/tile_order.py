"""The order in which a chain tries the tiles of a Triton kernel: measured, else ranked; the first of them compiled."""

from __future__ import annotations

import dataclasses

from tcport.device import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import AttentionSpec
from tcport.lowering.compile_check import Checked, check_tiles
from tcport.lowering.targets import Target, refusal
from tcport.tiling import rank_tiles
from tcport.tiling.tuned import measured


def tile_order(
    kernel: str, spec: AttentionSpec, profile: DeviceProfile, target: Target, *, by_measurement: bool = True
) -> Checked:
    """The tiles of a kernel that are legal on a device and for its family, best first.

    Args:
        by_measurement: let a tile that was measured to be faster go first.

    Raises:
        NoTileError: no tile is legal.
        OutOfResourcesError: none fits when compiled.
    """
    ranking = rank_tiles(spec, profile)
    legal = tuple(tile for tile in ranking.configs if refusal(target, tile) is None)
    if not legal:
        raise NoTileError(refusal(target, ranking.configs[0]) or "No tile is left.", "PyTorch takes such a call.")
    faster = measured(spec, profile) if by_measurement else None
    for tile in legal:
        if faster is not None and faster.is_of(tile):
            # It has shown what it does; it is compiled for the report alone.
            alone = check_tiles(kernel, spec, profile, dataclasses.replace(ranking, configs=(tile,)))
            rest = (other for other in legal if other != tile)
            return dataclasses.replace(alone, tiles=(tile, *rest), why=faster.why)
    return check_tiles(kernel, spec, profile, dataclasses.replace(ranking, configs=legal))
