"""TileLayoutOptimizer: from an attention spec and a device profile to ranked tiles."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from tcport.device.profile import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import FEW_KEYS, AttentionSpec, TileConfig
from tcport.tiling.constraints import TILE_BYTES, Constraint, constraints, tile_values, vector_products
from tcport.tiling.cost import cost_model, cost_values
from tcport.tiling.formula import Formula
from tcport.tiling.limits import Limits, limits_of
from tcport.tiling.problem import Problem, padded, problem_of
from tcport.tiling.splits import busy_ctas, part_count, split_count

_PRESSED = 8
_WIDEST_CUT = 64


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Tiles for one spec on one device.

    Attributes:
        kernel: ``decode``, ``prefill`` or ``kv_write``.
        configs: legal tiles, best first; never empty.
        rejected: tiles that break a constraint, each with the constraint and its numbers.
        costs: estimated seconds of each of ``configs``.
        notes: what was assumed because the profile does not know it, and what else a reader should know.
    """

    kernel: str
    configs: tuple[TileConfig, ...]
    rejected: tuple[tuple[TileConfig, str], ...]
    costs: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def rank_tiles(spec: AttentionSpec, profile: DeviceProfile) -> Ranking:
    """Ranks the tiles that fit the device, best first. The same arguments give the same answer in every process.

    Raises:
        ArgumentError: when the spec is impossible.
        NoTileError: when no tile fits.
    """
    return TileLayoutOptimizer(spec, profile).rank()


def register_estimate(spec: AttentionSpec, profile: DeviceProfile, config: TileConfig) -> float:
    """Estimated registers of one thread of the plain kernel with this tile."""
    return _optimizer(spec, profile).registers(config)


class TileLayoutOptimizer:
    """Constraints first, then cost, over every tile of one kernel; see ``constraints`` and ``cost``."""

    def __init__(self, spec: AttentionSpec, profile: DeviceProfile) -> None:
        self.spec = spec
        self.profile = profile
        problem = problem_of(spec)
        if vector_products(profile, problem):
            problem = dataclasses.replace(problem, query_bytes=max(4, problem.query_bytes))
        self.problem = problem
        self.limits = limits_of(profile)

    def rank(self) -> Ranking:
        """See :func:`rank_tiles`."""
        if self.profile.vendor == "cpu":
            return _cpu_ranking(self.problem, self.limits, self.profile, self.spec.num_splits)
        legal: list[TileConfig] = []
        pressed: list[TileConfig] = []
        rejected: list[tuple[TileConfig, str]] = []
        for config in _candidates(self.problem, self.profile):
            broken = self._broken(config)
            if broken is None:
                legal.append(self._with_splits(config))
            else:
                rejected.append((config, broken.reason(self._values(config))))
                if not broken.hard:
                    pressed.append(config)
        notes = self.limits.assumed
        if not legal and pressed:
            # A kernel that spills is slow, but it runs; the least pressed tiles go first. Their stages hold no
            # registers: one number of them for each shape leaves the compile check more shapes to try.
            pressed.sort(key=lambda config: (self.registers(config), _order(config)))
            shapes = {(tile.block_m, tile.block_n, tile.num_warps): tile for tile in reversed(pressed)}
            chosen = [tile for tile in pressed if tile in shapes.values()][:_PRESSED]
            legal = [self._with_splits(config) for config in chosen]
            rejected = [(config, why) for config, why in rejected if config not in chosen]
            notes += ("every tile is expected to spill registers; the least pressed ones are used",)
            return Ranking(self.problem.kernel, tuple(legal), tuple(rejected), tuple(map(self.cost, legal)), notes)
        if not legal:  # candidates are listed smallest first
            raise NoTileError(
                f"No {self.problem.kernel} tile fits; of {rejected[0][0]}, {rejected[0][1]}.",
                "The PyTorch decomposition takes such a call.",
            )
        overrated = {config: why for config in legal if (why := self._overrated(config))}
        if len(overrated) < len(legal):
            legal = [config for config in legal if config not in overrated]
            rejected += overrated.items()
        costs = {config: self.cost(config) for config in legal}
        # Differences below a hundredth are the model's noise: among such equals the leaner tile goes first.
        legal.sort(key=lambda config: (round(100 * math.log(costs[config])), _order(config)))
        return Ranking(
            self.problem.kernel, tuple(legal), tuple(rejected), tuple(costs[config] for config in legal), notes
        )

    def cost(self, config: TileConfig) -> float:
        """Estimated seconds of the call with this tile; the geometric mean over plausible sizes where some are open."""
        model = cost_model()
        times = [model(self._cost_values(config, problem)) for problem in self.problem.scenarios()]
        return math.exp(sum(map(math.log, times)) / len(times))

    def explain(self, config: TileConfig) -> list[str]:
        """Every constraint and every term of the cost, with the numbers in."""
        values = self._values(config)
        lines = [
            constraint.explain(values) for constraint in constraints(self.profile, config, self.problem, self.limits)
        ]
        return lines + cost_model().explain(self._cost_values(config, self.problem))

    def registers(self, config: TileConfig) -> float:
        """Estimated registers of one thread."""
        return constraints(self.profile, config, self.problem, self.limits)[2].demand(self._values(config))

    def _broken(self, config: TileConfig) -> Constraint | None:
        values = self._values(config)
        broken = [c for c in constraints(self.profile, config, self.problem, self.limits) if not c.holds(values)]
        return broken[0] if broken else None

    def _values(self, config: TileConfig) -> dict[str, float]:
        return tile_values(config, self.problem, self.limits)

    def _demand(self, config: TileConfig) -> dict[str, float]:
        values = self._values(config)
        shared, threads, registers = (
            c.demand(values) for c in constraints(self.profile, config, self.problem, self.limits)[:3]
        )
        return {"shared": shared, "threads": threads, "registers": min(registers, self.limits.registers_per_thread)}

    def _cost_values(self, config: TileConfig, problem: Problem) -> dict[str, float]:
        values = cost_values(config, problem, self.profile, self.limits, self._demand(config))
        return self._values(config) | values | {"splits": _cut(config, problem)}

    def _with_splits(self, config: TileConfig) -> TileConfig:
        if self.spec.num_splits is not None:
            return dataclasses.replace(config, num_splits=self.spec.num_splits)
        known = cost_values(config, self.problem, self.profile, self.limits, self._demand(config))
        units = self.limits.compute_units
        given = (self.problem, config.block_m, config.block_n, units, int(known["resident"]))
        splits = split_count(*given, invariant=self.spec.batch_invariant)
        if self.problem.kernel != "decode" or self.spec.batch_invariant or not _by_length(self.problem):
            return dataclasses.replace(config, num_splits=splits)
        tile_bytes = Formula("bytes of a tile", TILE_BYTES)(self._values(config))
        busy = busy_ctas(tile_bytes, config.num_warps, config.num_stages, known["bandwidth"], units)
        return dataclasses.replace(config, num_splits=splits, parts=part_count(*given, busy))

    def _overrated(self, config: TileConfig) -> str:
        """Why the cost model's word is not taken for a tile; empty where it is.

        Of 35 shapes on an H200 whose keys decode cuts, none was fastest with tiles of 128 keys or, cut by lengths, with
        one stage, and first choices that had them were up to 1.45 times as slow as the best. Why is not known.
        """
        if self.problem.kernel != "decode" or all(_cut(config, problem) == 1 for problem in self.problem.scenarios()):
            return ""
        if config.block_n > _WIDEST_CUT:
            return f"{config.block_n} keys a tile are for sequences that stay whole"
        single = config.num_stages == 1 and _by_length(self.problem)
        return "one stage is for sequences that stay whole" if single else ""


@functools.lru_cache(maxsize=64)
def _optimizer(spec: AttentionSpec, profile: DeviceProfile) -> TileLayoutOptimizer:
    return TileLayoutOptimizer(spec, profile)


def _cut(config: TileConfig, problem: Problem) -> int:
    """Into how many parts the keys of a sequence are cut, as :func:`attend_in_parts` and its neighbours cut them."""
    sizes = (problem.num_seqs, problem.num_tokens, problem.max_context)
    by_length = config.parts != 0 and _by_length(problem)
    return max(2, config.parts_each(*sizes)) if by_length else config.splits(*sizes)


def _by_length(problem: Problem) -> bool:
    """Whether decode may cut keys by the lengths of the batch: of several sequences of many keys."""
    many = problem.open_batch or problem.num_seqs > 1
    return many and (problem.open_context or problem.max_context > FEW_KEYS)


def _candidates(problem: Problem, profile: DeviceProfile) -> Iterator[TileConfig]:
    """Every tile worth asking about. The page size is not among the reasons: a tile may span pages or part of one."""
    rows = padded(problem.rows)
    if problem.kernel == "decode":
        blocks_m = [size for size in (16, 32, 64, 128) if size <= max(16, rows)]
    else:
        blocks_m = [16, 32, 64, 128]
    # Without an asynchronous copy NVIDIA's back end builds no pipeline, whatever the number of stages.
    stages = (1,) if profile.vendor == "nvidia" and profile.async_copy == "none" else (1, 2, 3, 4)
    grid = itertools.product(blocks_m, (16, 32, 64, 128), (1, 2, 4, 8), stages)
    return (TileConfig(*sizes) for sizes in grid)


def _order(config: TileConfig) -> tuple[int, ...]:
    """Breaks ties between equal costs.

    No splits (they need memory and a second kernel), three stages (fewer hide less, more hide no more), fewer warps,
    larger tiles.
    """
    cut = config.num_splits != 1 or config.parts != 0
    return (int(cut), abs(config.num_stages - 3), config.num_warps, -config.block_n, config.block_m)


def _cpu_ranking(problem: Problem, limits: Limits, profile: DeviceProfile, forced_splits: int | None) -> Ranking:
    """One tile: keys and values of a block stay in half of a core's second-level cache; splits occupy the cores."""
    row_bytes = (problem.dim_qk + problem.dim_v) * problem.kv_bytes
    keys = max(1, (profile.l2_bytes or 256 * 1024) // 2 // row_bytes)
    block_n = min(512, max(16, 1 << (keys.bit_length() - 1)))
    blocks = problem.num_seqs * problem.num_kv_heads
    splits = max(1, min(limits.compute_units // blocks, problem.max_context // block_n))
    if problem.open_batch:
        splits = 1
    config = TileConfig(padded(problem.rows), block_n, 1, 1, forced_splits or splits)
    return Ranking(problem.kernel, (config,), (), (), ("the CPU's kernels take the block of keys and the splits",))
