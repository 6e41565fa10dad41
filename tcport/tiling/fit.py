"""The compile check: the best tile whose compiled kernels fit the device, stepping down where one does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tcport.device.profile import DeviceProfile
from tcport.errors import KernelBuildError, OutOfResourcesError
from tcport.ir import AttentionSpec, TileConfig
from tcport.tiling.footprint import Compiled, compile_target, measure
from tcport.tiling.optimizer import Ranking

_MOST_ATTEMPTS = 8


@dataclasses.dataclass(frozen=True)
class Fit:
    """The outcome of the compile check.

    Attributes:
        config: the accepted tile.
        compiled: its footprints; an ``error`` in it says that nothing could be checked for this target.
        steps: the tiles tried before it, each with what was wrong.
        unusable: those of them that cannot be built or launched; the others spill.
    """

    config: TileConfig
    compiled: Compiled
    steps: tuple[tuple[TileConfig, str], ...] = ()
    unusable: tuple[TileConfig, ...] = ()


def fit(
    spec: AttentionSpec,
    profile: DeviceProfile,
    ranking: Ranking,
    entry: str | None = None,
    cache: Path | None = None,
) -> Fit:
    """Accepts the first tile that compiles, fits and does not spill; see :func:`step_down` for the order.

    A tile that fits but spills is kept in mind, and accepted when no tile without spills turns up.

    Args:
        ranking: of the same spec and profile; its first tile is tried first.
        entry, cache: as for :func:`tcport.tiling.footprint.measure`.

    Raises:
        OutOfResourcesError: when no tile fits; the caller goes to its next kernel.
        KernelBuildError: when none could be compiled.
    """
    if compile_target(profile) is None:
        return Fit(ranking.configs[0], measure(spec, ranking.configs[:1], profile, entry, cache)[0])
    tried: dict[TileConfig, str] = {}
    spilling: list[tuple[int, TileConfig, Compiled]] = []
    unusable: list[TileConfig] = []
    built = False
    config: TileConfig | None = ranking.configs[0]
    while config is not None and len(tried) < _MOST_ATTEMPTS:
        compiled = measure(spec, [config], profile, entry, cache)[0]
        trouble = compiled.error or compiled.over_limit(profile)
        too_big = trouble is not None
        built = built or compiled.error is None
        if trouble is None and compiled.spill == 0:
            return Fit(config, compiled, tuple(tried.items()), tuple(unusable))
        if trouble is not None:
            unusable.append(config)
        else:
            spilling.append((compiled.spill, config, compiled))
            trouble = f"{compiled.spill} bytes of a thread's registers spill"
        tried[config] = trouble
        config = step_down(config, ranking, tried, keep_stages=not too_big)
    if not spilling:
        last, why = next(reversed(tried.items()))
        if not built:
            raise KernelBuildError(
                f"No {ranking.kernel} tile compiles: tried {len(tried)}, the last was {last}: {why}.",
                "The next kernel of the chain takes the call.",
            )
        raise OutOfResourcesError(
            f"No {ranking.kernel} tile fits the device: tried {len(tried)}, the last was {last}: {why}.",
            "The next kernel of the chain takes the call.",
        )
    _, config, compiled = min(spilling, key=lambda entry: entry[0])
    return Fit(config, compiled, tuple((c, why) for c, why in tried.items() if c != config), tuple(unusable))


def step_down(
    config: TileConfig, ranking: Ranking, tried: dict[TileConfig, str], *, keep_stages: bool = False
) -> TileConfig | None:
    """The next tile to try: fewer stages, then a smaller tile, then any other; None when all have been tried.

    Among equals the better ranked goes first.

    Args:
        keep_stages: the tile fits and spills: stages cost no registers, so more warps share the same tile instead.
    """
    left = [other for other in ranking.configs if other not in tried]
    area = config.block_m * config.block_n
    if keep_stages:
        # Spills of one shape say nothing about its other stage counts but that they spill too.
        shapes = {(other.block_m, other.block_n, other.num_warps) for other in tried}
        left = [other for other in left if (other.block_m, other.block_n, other.num_warps) not in shapes]
        first = [
            other for other in left if other.block_m * other.block_n == area and other.num_warps > config.num_warps
        ]
    else:
        shape = (config.block_m, config.block_n, config.num_warps)
        same_tile = [
            other
            for other in left
            if (other.block_m, other.block_n, other.num_warps) == shape and other.num_stages < config.num_stages
        ]
        first = sorted(same_tile, key=lambda other: -other.num_stages)
    smaller = [other for other in left if other.block_m * other.block_n < area]
    return next(iter(first or smaller or left), None)
