"""What a tile costs, in seconds, as expressions that can be printed with the numbers in.

``T = t_launch + sum over waves of (t_start + tiles * t_tile) + t_merge``. ``t_tile`` is what one tile of keys needs of
what the CTAs of a unit share (memory, the matrix unit, issue slots), together with what a CTA waits for by itself. The
shape follows the waves models of split-KV planners. Device facts set the scale; what they leave open (``CONSTANTS``)
was fitted to a sweep on one H200 (``docs/measurements.md``) and is the same for every device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from sympy import Expr, Integer, Max, Min, Symbol, ceiling, floor, log

from tcport.device.profile import DeviceProfile
from tcport.ir import TileConfig
from tcport.tiling.constraints import (
    BM,
    BN,
    DIM_QK,
    DIM_V,
    QUANTISED,
    SPREAD,
    STAGES,
    TILE_BYTES,
    V_TILES,
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
RESULTS, READERS, LONGEST = size("result_bytes"), size("readers"), size("longest")
BY_WARP, BY_GROUP = size("by_warp"), size("by_group")

CONSTANTS: dict[str, float] = {
    "latency": 1.14e-6, "launch": 0.0879e-6, "start": 0.0685e-6,
    "merge": 1e-6, "merge_step": 0.42e-6, "merge_row": 0.753e-6,
    "tile_cycles": 165, "piece_cycles": 3.9, "element_cycles": 19.7, "convert_cycles": 0.0115, "across": 24,
    "exchange_cycles": 4.13, "sync_cycles": 14.6,
    "narrow_keys": 10.4, "narrow_rows": 0.155, "warp_level": 1.77,
    "cache_share": 0.6, "access_bytes": 1.44,
    "sharpness_shared": 1.99, "sharpness": 1.7, "idle_units": 0.17, "uneven": 25.3,
}  # fmt: skip
"""Seconds, cycles, and plain factors, by name. They are fitted together: one alone says little about a device.

latency: until a tile's keys arrive when nothing was fetched ahead. launch, start: of a kernel, and of a CTA.
merge, merge_step, merge_row: of the second kernel (not fitted), of every 16 splits in it, and of every row of a result
that a unit has to merge: each is a CTA of its own.
tile_cycles: what a warp issues for a tile of any size. element_cycles: for one logit. piece_cycles: to fetch 16 bytes
of keys. convert_cycles: to widen one quantised element. across: how much more the last two are where warps share rows.
exchange_cycles, sync_cycles: to combine a row's maxima and sums over twice as many warps; for every warp that waits.
narrow_keys, narrow_rows: keys of a tile and rows of a warp that take as long as reading their operands. warp_level: how
much slower products of single warps are, where the device multiplies by groups of four.
cache_share: of the bytes of keys that other CTAs read too. access_bytes: wasted where a run of bytes ends.
sharpness_shared, sharpness: exponents of the norms over what is shared, and over that and the waiting; 1 adds, infinity
takes the largest. idle_units: how much of a unit's time counts when its neighbours have one CTA more. uneven: how fast
a last wave that is not full fills up, as the keys of its CTAs differ from those of the longest.
"""

(
    LATENCY, LAUNCH, START, MERGE, MERGE_STEP, MERGE_ROW,
    TILE_CYCLES, PIECE_CYCLES, ELEMENT_CYCLES, CONVERT_CYCLES, ACROSS, EXCHANGE_CYCLES, SYNC_CYCLES,
    NARROW_KEYS, NARROW_ROWS, WARP_LEVEL, CACHE_SHARE, ACCESS_BYTES,
    SHARPNESS_SHARED, SHARPNESS, IDLE_UNITS, UNEVEN,
) = map(size, CONSTANTS)  # fmt: skip
_LANES = 128  # fp32 lanes of one unit on every device of the catalogue but the smallest


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
    full = term("full_waves", floor(work / room))
    rest = term("last_wave", Max(0, work - full * room), "CTAs")
    # Blocks of a causal prompt see more keys the later they lie: all of them at once are as slow as the last.
    keys = term("keys_each", KEYS + (LONGEST - KEYS) / Max(1, work / room))
    tiles = term("tiles", ceiling(keys / (BN * SPLITS)))

    # Blocks of rows that read the same keys at the same time are served by the cache, at a few times the bandwidth.
    fetched = term("fetched_bytes", TILE_BYTES * Max(1 / READERS, CACHE_SHARE) * (1 + ACCESS_BYTES / RUN), "bytes")
    # Narrow tiles and few rows per warp read their operands more often than they multiply.
    reads = term("reads", (1 + NARROW_KEYS / BN) * (1 + NARROW_ROWS / Max(16, BM / WARPS)) * (1 + WARP_LEVEL * BY_WARP))
    products = term("products", 2 * BM * BN * (DIM_QK + DIM_V) * reads * UNITS / FLOPS, "s")
    # What a warp issues: every lane has its share of a tile; four schedulers of a unit take the warps in turn.
    pieces, elements = TILE_BYTES / 16 * PIECE_CYCLES, BM * BN * ELEMENT_CYCLES
    converted = QUANTISED * BN * (DIM_QK + V_TILES * DIM_V) * CONVERT_CYCLES / SPREAD
    logits = term("logit_slots", elements / WARPS / WARP_WIDTH, "cycles")
    share = (pieces / WARPS + converted) / WARP_WIDTH
    slots = term("slots", TILE_CYCLES + logits + share * (1 + ACROSS * (1 - 1 / SPREAD)), "cycles")
    issue = term("issue", WARPS * slots / 4 / CLOCK, "s")
    # What a CTA waits for by itself: its softmax stands between its products. Three stages hide what there is to hide,
    # as page ids are loaded a tile ahead. A group of four warps that has its unit to itself waits for its products one
    # by one, while another group would multiply.
    exchange = EXCHANGE_CYCLES * log(SPREAD, 2) + SYNC_CYCLES * (WARPS - 1)
    rate = Min(1, WARPS / 4, WARPS * RESIDENT / (4 + 4 * BY_GROUP))
    own = term("t_own", products / rate + (exchange + logits) / CLOCK, "s")
    bare = term("unhidden", Max(0, 3 - STAGES) / 2)
    alone = term("t_alone", Max(own + LATENCY * bare, LATENCY / Max(1, Min(3, STAGES) - 1)), "s")

    def wave(name: str, running: Expr) -> Expr:
        """Seconds of a wave of so many CTAs."""
        memory = term(f"t_memory_{name}", fetched * running / BANDWIDTH, "s")
        even = Max(1, running / UNITS)
        crowd = term(f"crowd_{name}", even + IDLE_UNITS * (ceiling(running / UNITS) - even), "CTAs")
        used = sum((each**SHARPNESS_SHARED for each in (memory, products * crowd, issue * crowd)), Integer(0))
        both = used ** (SHARPNESS / SHARPNESS_SHARED) + alone**SHARPNESS
        tile = term(f"t_tile_{name}", both ** (1 / SHARPNESS), "s")
        return START + LATENCY * (1 - bare) + tiles * tile

    # CTAs of one length end together, and a nearly empty wave takes as long as a full one. Where lengths differ, those
    # of the last wave begin as others end.
    uneven = term("uneven_share", Min(1, UNEVEN * (1 - KEYS / LONGEST)) * Min(1, full))
    last = term("last_share", Min(1, rest) * (1 - uneven * (1 - rest / room)))
    waves = term("t_waves", full * wave("full", room) + last * wave("last", rest), "s")
    rows = RESULTS / (4 * DIM_V)
    merged = MERGE_STEP * ceiling(SPLITS / 16) + MERGE_ROW * rows / UNITS + 2 * SPLITS * RESULTS / BANDWIDTH
    merge = term("t_merge", Min(1, SPLITS - 1) * (MERGE + merged), "s")
    term("t_call", waves + merge + LAUNCH, "s")
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
        blocks = problem.num_seqs * -(-problem.num_tokens // (problem.num_seqs * tokens))
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
    unit = matrix_unit(profile, config, problem)
    grouped = profile.mma_atom in ("wgmma", "tcgen05")
    return CONSTANTS | {
        "units": units,
        "resident": resident_ctas(limits, demand),
        "blocks": blocks * problem.num_kv_heads * head_blocks,
        "keys": keys,
        "by_warp": int(grouped and unit == "mma"),
        "by_group": int(unit == "wgmma"),
        "longest": problem.max_context,
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
