"""From an attention spec and a device profile to ranked tiles."""

from __future__ import annotations

import dataclasses
import itertools

import sympy

from tcport.device.profile import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import BATCH, AttentionSpec, CeilDiv, Dim, TileConfig
from tcport.tiling.constraints import constraints, shared_bytes, values_of
from tcport.tiling.limits import Limits, limits_of
from tcport.tiling.problem import Problem, is_symbolic, padded, problem_of


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Tiles for one spec on one device.

    Attributes:
        kernel: ``decode`` or ``prefill``.
        configs: legal tiles, best first; never empty.
        rejected: tiles that break a constraint, each with the constraint and its numbers.
        notes: what was assumed because the profile does not know it.
    """

    kernel: str
    configs: tuple[TileConfig, ...]
    rejected: tuple[tuple[TileConfig, str], ...]
    notes: tuple[str, ...] = ()


def rank_tiles(spec: AttentionSpec, profile: DeviceProfile) -> Ranking:
    """Ranks the tiles that fit the device, best first.

    Raises:
        ArgumentError: when the spec is impossible.
        NoTileError: when no tile fits.
    """
    problem, limits = problem_of(spec), limits_of(profile)
    legal, rejected = [], []
    for tile in _candidates(problem):
        config = dataclasses.replace(tile, num_splits=_splits(spec, problem, limits, tile))
        values = values_of(config, problem, limits)
        broken = next((c for c in constraints() if not c.holds(values, limits)), None)
        if broken is None:
            legal.append(config)
        else:
            rejected.append((config, broken.explain(values, limits)))
    if not legal:
        raise NoTileError(
            f"No {problem.kernel} tile fits: {rejected[-1][1]}.", "The PyTorch decomposition takes such a call."
        )
    legal.sort(key=lambda config: _preference(config, problem))
    return Ranking(problem.kernel, tuple(legal), tuple(rejected), limits.assumed)


def _candidates(problem: Problem) -> list[TileConfig]:
    if problem.kernel == "decode":
        rows = [min(padded(problem.rows), 64)]
        grid = itertools.product(rows, (128, 64, 32, 16), (4, 2, 1, 8), (3, 2, 4, 1))
    else:
        grid = itertools.product((128, 64, 32, 16), (128, 64, 32, 16), (8, 4), (3, 2, 1))
    return [TileConfig(*sizes) for sizes in grid]


def _preference(config: TileConfig, problem: Problem) -> tuple[int, ...]:
    """Distance in powers of two from the shape that decided the prototypes."""
    wanted = (16, 64, 2, 3) if problem.kernel == "decode" else (128, 64, 8, 3)
    given = (config.block_m, config.block_n, config.num_warps, config.num_stages)
    return (sum(abs(g.bit_length() - w.bit_length()) for g, w in zip(given, wanted, strict=True)), *given)


def _splits(spec: AttentionSpec, problem: Problem, limits: Limits, tile: TileConfig) -> Dim:
    """CTAs that share one sequence and KV head, so that a small batch still fills the device."""
    if spec.num_splits is not None:
        return spec.num_splits
    if problem.kernel != "decode":
        return 1
    shared = shared_bytes().subs({s: values_of(tile, problem, limits)[s.name] for s in shared_bytes().free_symbols})
    resident = limits.compute_units * max(1, min(2, limits.shared_per_unit // int(shared)))
    per_sequence = problem.num_kv_heads * -(-problem.rows // tile.block_m)
    cap = 128 if is_symbolic(problem.max_context) else min(128, -(-int(problem.max_context) // (4 * tile.block_n)))
    if spec.batch_invariant:
        return max(1, min(resident // (8 * per_sequence), 16))
    if not is_symbolic(problem.num_seqs):
        return max(1, min(resident // (max(1, int(problem.num_seqs)) * per_sequence), cap))
    # floor(a / b), said with the ceiling that a traced batch size knows how to evaluate.
    whole = CeilDiv(resident + 1 - per_sequence * BATCH, per_sequence * BATCH)
    return sympy.Max(1, sympy.Min(cap, whole)) if cap > 1 else 1
