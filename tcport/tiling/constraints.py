"""What a tile must keep, as expressions that can be printed with the numbers in.

The shared-memory expression is what Triton 3.6 to 3.9 allocate for tcport's attention kernel, checked against compiled
kernels (``ir_tests/test_tiling_footprint.py``); the register expression is an estimate, and the compile check has the
last word on both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from sympy import Max, Min, Rational, floor

from tcport.device.profile import DeviceProfile
from tcport.ir import TileConfig
from tcport.tiling.formula import Formula, size
from tcport.tiling.limits import Limits
from tcport.tiling.problem import Problem

BM, BN, WARPS, STAGES = size("block_m"), size("block_n"), size("warps"), size("stages")
DIM_QK, DIM_V, QUERY_BYTES, KV_BYTES = size("dim_qk"), size("dim_v"), size("query_bytes"), size("kv_bytes")
WARP_WIDTH, V_TILES = size("warp_width"), size("v_tiles")
QUANTISED, BYTEWISE = size("quantised"), size("bytewise")
MASK, SCALES = size("mask"), size("scales")
SPREAD = Max(1, 16 * WARPS / BM)
"""Warps that share the columns of one block of rows; 1 when every warp has rows of its own."""
TILE_BYTES = BN * (DIM_QK + V_TILES * DIM_V) * KV_BYTES


_THREADS = Formula("threads of a CTA", WARPS * WARP_WIDTH)

# Two warpgroups on the same 64 rows: on an H200 with triton 3.6 (2026-11-30) blocks of 64 rows with 8 warps gave wrong
# results, and illegal accesses, for every block_n and stage count tried; 4 warps on 64 rows and 8 on 128 are right.
_SHARED_ROWS = Formula("warps on the same rows of a warpgroup product", SPREAD)

# The product with V issues one instruction per 16 keys, each behind a descriptor of its own. On an H200 (2026-11-30,
# triton 3.6 with its ptxas 12.8) V of 8 to 32 columns gave wrong results and illegal accesses at 64 and 128 keys with
# keys of 64 and 128 dims. With 32 keys, with V of 64 columns, and from the same PTX through ptxas 13.0 all was right.
# The machine code reuses a descriptor's registers between the instructions; that this is the cause is not proven.
_SHORT_PRODUCTS = Formula("keys of a warpgroup product with fewer than 64 columns", BN * Min(1, floor(63 / DIM_V)))

# Reductions across warps and page ids on their way to another layout.
_SCRATCH = 256


@dataclasses.dataclass(frozen=True)
class Constraint:
    """``demand <= limit``.

    Attributes:
        hard: a kernel that breaks it cannot be launched; a soft one runs, but badly (spilled registers).
    """

    demand: Formula
    limit: int
    hard: bool = True

    def holds(self, values: Mapping[str, float]) -> bool:
        return self.demand(values) <= self.limit

    def explain(self, values: Mapping[str, float]) -> str:
        """The expression, its numbers, and the limit."""
        return f"{self.demand.explain(values)}: {self._verdict(values)}"

    def reason(self, values: Mapping[str, float]) -> str:
        """The result and the limit, without the expression."""
        return f"{self.demand.name}: {self.demand.result(values)} {self._verdict(values)}"

    def _verdict(self, values: Mapping[str, float]) -> str:
        return f"{'fits' if self.holds(values) else 'exceeds'} the limit of {self.limit}"


def constraints(profile: DeviceProfile, config: TileConfig, problem: Problem, limits: Limits) -> tuple[Constraint, ...]:
    """Shared memory, threads and registers, then what else must hold for the way the device multiplies matrices."""
    unit = matrix_unit(profile, config, problem)
    always = (
        Constraint(shared_memory(unit), limits.shared_per_cta),
        Constraint(_THREADS, limits.threads_per_cta),
        Constraint(registers(unit), limits.registers_per_thread, hard=False),
    )
    return (*always, Constraint(_SHARED_ROWS, 1), Constraint(_SHORT_PRODUCTS, 32)) if unit == "wgmma" else always


def matrix_unit(profile: DeviceProfile, config: TileConfig, problem: Problem) -> str:
    """How this tile's products are computed.

    ``wgmma`` (operands in shared memory), ``mma`` (operands in registers), AMD's ``mfma`` and ``wmma``, or ``fma``: the
    vector lanes, for fp32 in full precision and for bf16 on a device whose matrix units lack it.
    """
    if vector_products(profile, problem):
        return "fma"
    if profile.vendor == "amd":
        return "mfma" if (profile.mma_atom or "mfma") == "mfma" else "wmma"
    if profile.mma_atom in ("wgmma", "tcgen05") and config.block_m >= 64 and config.num_warps % 4 == 0:
        return "wgmma"
    return "mma"


def vector_products(profile: DeviceProfile, problem: Problem) -> bool:
    """Whether products run on the vector lanes in fp32 rather than on matrix units."""
    if profile.vendor == "amd" and profile.mma_atom == "mfma":
        return False  # has fp32 matrix instructions
    if profile.vendor == "nvidia" and profile.async_copy == "none":
        return True  # Triton uses matrix instructions from sm_80 on
    return problem.query_bytes > 2 or (problem.bf16 and profile.flags.get("bf16") is False)


@functools.cache
def shared_memory(unit: str) -> Formula:
    """Bytes of shared memory of one CTA.

    K and V have ``stages - 1`` buffers each (page ids are carried one tile ahead, so their loads are plain loads to
    the pipeliner); ``wgmma`` reads its operands while the next copy is under way and has ``stages``. Without a
    pipeline the larger of the two tiles passes through. On NVIDIA the query tile stays in shared memory beside them;
    on AMD it passes through before. A scale per token, in fp32, is pipelined beside its key and its value; whether a
    scale is of that kind is not among a spec's facts, so any scale counts. Probabilities are exchanged through it
    unless every warp has rows to itself, and the elements of an explicit mask change their layout in it.
    """
    largest = Max(DIM_QK, V_TILES * DIM_V) * BN * QUERY_BYTES
    # One formula for all stage counts: at one stage the first term vanishes and the second stands.
    buffers = STAGES - 1 if unit != "wgmma" else STAGES * Min(1, STAGES - 1)
    loop = Max(buffers * TILE_BYTES, largest)
    scales = SCALES * buffers * BN * 2 * 4
    query = BM * DIM_QK * QUERY_BYTES
    weights = BM * BN * QUERY_BYTES * Min(1, floor(16 * WARPS / BM))
    if unit == "wgmma":
        total = loop + query
    elif unit in ("mma", "fma"):
        total = loop + query + weights
    else:
        # A quantised tile is widened through shared memory.
        total = Max(loop + weights + QUANTISED * BN * DIM_V * QUERY_BYTES, query)
    return Formula("shared memory of a CTA", total + scales + MASK * BM * BN * 4 + _SCRATCH, "bytes")


@functools.cache
def registers(unit: str) -> Formula:
    """Estimated 32-bit registers of one thread.

    Live across the loop: the accumulator, the query operand, logits and weights. In the loop: a key or value operand,
    half of which is live on average, and 64-bit addresses of 16-byte pieces. Warps beyond those that cover the rows
    share an operand's columns, except in ``wmma``, where every warp holds the whole operand, each half-wave a copy.
    A quantised element that is unpacked by itself takes 32 bits; an element of an explicit mask has a 64-bit address.
    """
    threads = WARPS * WARP_WIDTH
    widest = Max(DIM_QK, V_TILES * DIM_V)
    words = BN * widest * QUERY_BYTES / 4
    held = BM * DIM_V + BM * BN * 3 / 2 + MASK * BM * BN * 2
    addresses = TILE_BYTES / 16 * 2 / 2
    if unit == "wgmma":
        return Formula("registers of a thread", Min(DIM_V, 128) / 4 + (held + addresses) / threads * Rational(13, 10))
    held += BM * DIM_QK * QUERY_BYTES / 4
    unpacked = BYTEWISE * BN * widest
    if unit == "wmma":
        return Formula("registers of a thread", 40 + held / threads + words * 5 / 2 / 16 + unpacked / threads)
    operand = words / 2 / (WARP_WIDTH * SPREAD)
    # Warps that share rows hold more than their share: measured, as is the whole expression.
    live = ((held + addresses) / threads + operand) * (1 + Min(1, SPREAD - 1) * Rational(9, 50)) + unpacked / threads
    # On vector lanes every product has its operands in registers of its own.
    return Formula("registers of a thread", 40 + (2 * live if unit == "fma" else live))


def tile_values(config: TileConfig, problem: Problem, limits: Limits) -> dict[str, float]:
    """The numbers of one tile, by name."""
    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "warps": config.num_warps,
        "stages": config.num_stages,
        "dim_qk": problem.dim_qk,
        "dim_v": problem.dim_v,
        "query_bytes": problem.query_bytes,
        "kv_bytes": problem.kv_bytes,
        "v_tiles": 0 if problem.v_is_view_of_k else 1,
        "quantised": int(problem.quantised),
        "bytewise": int(problem.bytewise),
        "mask": int(problem.mask),
        "scales": int(problem.scales),
        "warp_width": limits.warp_width,
    }
