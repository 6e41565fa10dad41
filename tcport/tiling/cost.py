"""What a tile costs, in seconds, as expressions that can be printed with the numbers in.

``T = waves * (t_start + tiles * t_tile) + t_merge + t_launch`` with ``t_tile`` the slowest of what one tile of keys
needs: its bytes from memory, the pipeline's own latency, its products, its exponentials. The shape follows the waves
models of split-KV planners; the constants below are a device's latencies, not a table per architecture.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from sympy import Expr, Max, Min, Rational, Symbol, ceiling, log

from tcport.device.profile import DeviceProfile
from tcport.ir import TileConfig
from tcport.tiling.constraints import (
    BM,
    BN,
    DIM_QK,
    DIM_V,
    SPREAD,
    STAGES,
    TILE_BYTES,
    WARP_WIDTH,
    WARPS,
    matrix_unit,
    vector_products,
)
from tcport.tiling.formula import Formula, size
from tcport.tiling.limits import Limits
from tcport.tiling.problem import Problem

UNITS, RESIDENT, BLOCKS, SPLITS, KEYS = size("units"), size("resident"), size("blocks"), size("splits"), size("keys")
BANDWIDTH, RUN, FLOPS, CLOCK = size("bandwidth"), size("run_bytes"), size("flops"), size("clock")
RESULTS, READERS = size("result_bytes"), size("readers")

# Seconds or cycles, from published microbenchmarks of GPUs of this decade and the launch costs of CUDA and HIP.
_MEMORY_LATENCY = 0.8e-6
_START = 1.5e-6
_LAUNCH = 3e-6
_TILE_CYCLES = 300
_EXCHANGE_CYCLES = 250
_SOFTMAX_CYCLES_PER_ELEMENT = 12
_LANES = 128  # fp32 lanes of one unit on every device of the catalogue but the smallest
_IMPERFECT = 1 / 16
_CACHE_SHARE = 0.4
_SECTOR = 32  # bytes: a run shorter than a few sectors wastes part of each access


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Terms that build on each other by name; the last is the time of the call, in seconds."""

    terms: tuple[Formula, ...]

    def __call__(self, values: Mapping[str, float]) -> float:
        return self._evaluated(values)[self.terms[-1].name]

    def explain(self, values: Mapping[str, float]) -> list[str]:
        """One line for each term, with the numbers in."""
        known = self._evaluated(values)
        return [term.explain(known) for term in self.terms]

    def _evaluated(self, values: Mapping[str, float]) -> dict[str, float]:
        known = dict(values)
        for term in self.terms:
            known[term.name] = term(known)
        return known


@functools.cache
def cost_model() -> CostModel:
    """The cost of one call."""
    terms: list[Formula] = []

    def term(name: str, expression: Expr, unit: str = "") -> Symbol:
        terms.append(Formula(name, expression, unit))
        return terms[-1].symbol

    work = term("ctas", BLOCKS * SPLITS)
    room = term("room", RESIDENT * UNITS, "CTAs")
    running = term("running", Min(work, room), "CTAs")
    per_unit = term("per_unit", Max(1, running / UNITS), "CTAs")
    # A last wave that is not full still costs most of a wave, and less than a whole one.
    waves = term("waves", Max(1, (ceiling(work / room) + work / room) / 2))
    tiles = term("tiles", ceiling(KEYS / (BN * SPLITS)))
    # Blocks of rows that read the same keys at the same time are served by the cache, at a few times the bandwidth.
    fetched = term("fetched_bytes", TILE_BYTES * Max(1 / READERS, _CACHE_SHARE), "bytes")
    memory = term("t_memory", fetched * running * (1 + _SECTOR / RUN) / BANDWIDTH, "s")
    # Narrow tiles and few rows per warp read their operands more often than they multiply.
    reuse = term("reuse", (BN + 16) / BN * (1 + 8 / Max(16, BM / WARPS)))
    matrix = term("t_products", 2 * BM * BN * (DIM_QK + DIM_V) * reuse * per_unit * UNITS / FLOPS, "s")
    # Four schedulers of a unit issue what every warp does per tile beside its elements.
    exchange = _EXCHANGE_CYCLES * log(SPREAD, 2)
    issue = BM * BN * _SOFTMAX_CYCLES_PER_ELEMENT / _LANES + WARPS * (_TILE_CYCLES / 4 + exchange / 8)
    softmax = term("t_softmax", issue * per_unit / CLOCK, "s")
    elements = BM * BN * _SOFTMAX_CYCLES_PER_ELEMENT / (WARP_WIDTH * WARPS)
    own = term("t_chain", (_TILE_CYCLES + exchange + elements) / CLOCK, "s")
    # Buffers that fill while a tile is computed; a single one is refilled as soon as its last reader is done.
    ahead = term("ahead", Max(1, STAGES - Rational(1, 2)), "tiles")
    latency = term("t_latency", Max(own, _MEMORY_LATENCY / ahead), "s")
    # The slowest decides; the others overlap with it, but never quite. What a CTA waits for by itself is hidden by
    # its buffers and by its neighbours.
    exposed = (_MEMORY_LATENCY + own) / (ahead**3 * per_unit)
    overlap = term("t_overlap", (memory + matrix + softmax) * _IMPERFECT + exposed, "s")
    tile = term("t_tile", Max(memory, matrix + softmax / 2, latency) + overlap, "s")
    merge = term("t_merge", Min(1, SPLITS - 1) * (_LAUNCH / 2 + 2 * SPLITS * RESULTS / BANDWIDTH), "s")
    term("t_call", waves * (_START + tiles * tile) + merge + _LAUNCH, "s")
    return CostModel(tuple(terms))


def cost_values(
    config: TileConfig, problem: Problem, profile: DeviceProfile, limits: Limits, demand: Mapping[str, float]
) -> dict[str, float]:
    """The numbers of the cost model that the constraints do not have already.

    Args:
        demand: shared memory, registers and threads of a CTA, under ``shared``, ``registers``, ``threads``.
    """
    tokens = max(1, config.block_m // problem.rows)
    head_blocks = -(-problem.rows // config.block_m)
    if problem.kernel == "decode":
        blocks, keys, readers = problem.num_seqs, problem.max_context, head_blocks
    else:
        blocks = problem.num_tokens // tokens + problem.num_seqs
        # Causal blocks see on average the middle between the cached context and the end of their own tokens.
        own_tokens = problem.num_tokens / problem.num_seqs
        readers = max(1.0, blocks / problem.num_seqs) * head_blocks
        keys = max(1.0, problem.max_context - (own_tokens / 2 if problem.causal else 0))
    units, clock = limits.compute_units, profile.clock_hz or 1.5e9
    bandwidth = profile.memory_bandwidth or units * 2.0e10
    # Unknown peak: the slower of the rates that current targets have.
    flops = profile.matrix_flops or units * clock * 512
    if vector_products(profile, problem):
        flops = units * clock * 2 * _LANES
    elif matrix_unit(profile, config, problem) == "mma" and profile.mma_atom in ("wgmma", "tcgen05"):
        flops *= 0.6 if profile.mma_atom == "wgmma" else 0.3  # the warp-level instruction's share of the peak
    return {
        "units": units,
        "resident": resident_ctas(limits, demand),
        "blocks": blocks * problem.num_kv_heads * head_blocks,
        "keys": keys,
        "readers": readers,
        "bandwidth": bandwidth,
        "run_bytes": problem.run_bytes,
        "flops": flops,
        "clock": clock,
        "result_bytes": problem.num_tokens * problem.num_kv_heads * problem.rows * problem.dim_v * 4,
    }


def resident_ctas(limits: Limits, demand: Mapping[str, float]) -> int:
    """CTAs that one compute unit holds at a time: what shared memory, registers and threads leave room for."""
    return max(
        1,
        min(
            int(limits.shared_per_unit // (demand["shared"] + 1024)),  # 1 KiB of each CTA is the system's
            int(limits.registers_per_unit // (demand["registers"] * demand["threads"])),
            int(limits.threads_per_unit // demand["threads"]),
            32,
        ),
    )
