"""The compile check: the best tile whose compiled kernels fit the device, stepping down where one does not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from tcport.device.profile import DeviceProfile
from tcport.errors import KernelBuildError, OutOfResourcesError
from tcport.ir import AttentionSpec, TileConfig
from tcport.tiling.footprint import Compiled, compile_target, measure
from tcport.tiling.optimizer import Ranking, register_estimate

RUN_TIME_STEPS = 3
"""Further tiles that are compiled because of spilled registers, where a first call waits for them."""
_MOST_UNUSABLE = 8
_HELD_BY_STAGES = 128  # bytes of a thread, about


@dataclasses.dataclass(frozen=True)
class Fit:
    """The outcome of the compile check.

    Attributes:
        config: the accepted tile.
        compiled: its footprints; an ``error`` in it says that nothing could be checked for this target.
        steps: the other tiles tried, each with what was wrong.
        unusable: those of them that cannot be built or launched; the others spill.
        exhausted: the accepted tile spills, and no tile that might not is left untried.
    """

    config: TileConfig
    compiled: Compiled
    steps: tuple[tuple[TileConfig, str], ...] = ()
    unusable: tuple[TileConfig, ...] = ()
    exhausted: bool = False

    @property
    def verdict(self) -> str:
        """Why a tile that spills is accepted; empty for one that does not."""
        if not self.compiled.spill:
            return ""
        rest = "the rest have blocks as large under no more warps" if self.exhausted else "the rest were not compiled"
        return f"it spills the least of the {len(self.steps) + 1} tiles compiled, none of which does not; {rest}"


def fit(
    spec: AttentionSpec,
    profile: DeviceProfile,
    ranking: Ranking,
    entry: str | None = None,
    cache: Path | None = None,
    spill_steps: int | None = RUN_TIME_STEPS,
) -> Fit:
    """Accepts the first tile that compiles, fits and does not spill.

    What does not fit is followed by :func:`step_down`, what spills by :func:`lighter`: the lightest tile first. If that
    spills, hardly any other can help; if not, better ranked ones are tried before it is accepted. Of tiles that all
    spill, the one that spills least is.

    Args:
        ranking: of the same spec and profile; its first tile is tried first.
        entry, cache: as for :func:`tcport.tiling.footprint.measure`.
        spill_steps: how many further tiles are compiled because others spill; None: all that might not.

    Raises:
        OutOfResourcesError: when no tile fits; the caller goes to its next kernel.
        KernelBuildError: when none could be compiled.
    """
    if compile_target(profile) is None:
        return Fit(ranking.configs[0], measure(spec, ranking.configs[:1], profile, entry, cache)[0])
    pressure = functools.partial(register_estimate, spec, profile)
    most = RUN_TIME_STEPS if spill_steps is None else max(1, spill_steps)
    tried: dict[TileConfig, str] = {}
    spilling: dict[TileConfig, Compiled] = {}
    unusable: list[TileConfig] = []
    built = False
    config: TileConfig | None = ranking.configs[0]
    while config is not None and len(unusable) < _MOST_UNUSABLE:
        if spill_steps is not None and len(spilling) > spill_steps:
            break
        compiled = measure(spec, [config], profile, entry, cache)[0]
        trouble = compiled.error or compiled.over_limit(profile)
        built = built or compiled.error is None
        if trouble is None and compiled.spill == 0:
            for other in _better(ranking, config, tried, spilling, pressure)[: most - 1]:
                found = measure(spec, [other], profile, entry, cache)[0]
                wrong = found.error or found.over_limit(profile) or _spills(found)
                if not wrong:
                    config, compiled = other, found
                    break
                tried[other] = wrong
            return Fit(config, compiled, tuple(tried.items()), tuple(unusable))
        if trouble is not None:
            unusable.append(config)
            tried[config] = trouble
            config = step_down(config, ranking, tried)
        else:
            spilling[config] = compiled
            tried[config] = _spills(compiled)
            config = lighter(ranking, tried, spilling, pressure)
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
    least = min(spilling, key=lambda tile: spilling[tile].spill)
    steps = tuple((tile, why) for tile, why in tried.items() if tile != least)
    return Fit(least, spilling[least], steps, tuple(unusable), exhausted=config is None)


def step_down(config: TileConfig, ranking: Ranking, tried: Container[TileConfig]) -> TileConfig | None:
    """The next tile after one that does not fit: fewer stages, then a smaller tile, then any other; None: all tried.

    Among equals the better ranked goes first.
    """
    left = [other for other in ranking.configs if other not in tried]
    fewer = [other for other in left if _shape(other) == _shape(config) and other.num_stages < config.num_stages]
    area = config.block_m * config.block_n
    smaller = [other for other in left if other.block_m * other.block_n < area]
    return next(iter(sorted(fewer, key=lambda other: -other.num_stages) or smaller or left), None)


def lighter(
    ranking: Ranking,
    tried: Container[TileConfig],
    spilling: Mapping[TileConfig, Compiled],
    pressure: Callable[[TileConfig], float],
) -> TileConfig | None:
    """The next tile after one that spills; None where no tile is left that might not.

    The one that needs fewest registers, which says most about the rest. Left out are blocks at least as large under no
    more warps than those of one that spills. Stages hold few registers: other numbers of them are tried last, for the
    tile that spills least, if that is little.

    Args:
        pressure: estimated registers of a thread.
    """
    left = [tile for tile in ranking.configs if tile not in tried and not any(_covers(tile, s) for s in spilling)]
    if left:
        return min(left, key=pressure)
    least = min(spilling, key=lambda tile: spilling[tile].spill)
    if spilling[least].spill > _HELD_BY_STAGES:
        return None
    return next((tile for tile in ranking.configs if _shape(tile) == _shape(least) and tile not in tried), None)


def _better(
    ranking: Ranking,
    config: TileConfig,
    tried: Container[TileConfig],
    spilling: Mapping[TileConfig, Compiled],
    pressure: Callable[[TileConfig], float],
) -> list[TileConfig]:
    """Tiles that rank above one that does not spill and may not either: none where no tile has spilled."""
    if not spilling:
        return []
    limit = min(map(pressure, spilling))
    above = ranking.configs[: ranking.configs.index(config)]
    return [tile for tile in above if tile not in tried and pressure(tile) < limit]


def _spills(compiled: Compiled) -> str:
    return f"{compiled.spill} bytes of a thread's registers spill" if compiled.spill else ""


def _covers(tile: TileConfig, other: TileConfig) -> bool:
    """Whether a thread of ``tile`` holds no less than one of ``other``."""
    as_large = tile.block_m >= other.block_m and tile.block_n >= other.block_n
    return as_large and tile.num_warps <= other.num_warps


def _shape(tile: TileConfig) -> tuple[int, int, int]:
    return tile.block_m, tile.block_n, tile.num_warps
