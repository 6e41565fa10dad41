"""The tile of a cache write: which rows one program moves. A row is one head of one token, of K and of V."""

from __future__ import annotations

import functools
from typing import Protocol

from tcport.device.profile import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import Dim, TileConfig
from tcport.tiling.limits import limits_of
from tcport.tiling.optimizer import Ranking
from tcport.tiling.problem import dtype_bytes, is_symbolic, padded

# A thread moves 16 bytes in one instruction; two of K and two of V in flight hide the latency of each other.
_BYTES_PER_THREAD = 16
_PIECES_IN_FLIGHT = 2
_NOMINAL_TOKENS = 256
# Units that may have nothing to do: larger tiles start fewer programs, and that is worth as much.
_IDLE_UNITS = 1 / 4


class Write(Protocol):
    """The facts of a cache write that choose its tile."""

    @property
    def num_tokens(self) -> Dim: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim_qk(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def source_dtype(self) -> str: ...


@functools.lru_cache(maxsize=1024)
def rank_write_tiles(spec: Write, profile: DeviceProfile) -> Ranking:
    """Tiles of ``block_m`` rows by ``block_n`` elements (the wider of K and V, padded), best first.

    A write has no reuse: every legal tile moves the same bytes. What differs is how much each thread has in flight,
    and whether there are programs for every unit; of tiles equal in both, the largest starts the fewest programs.

    Raises:
        ArgumentError: when the dtype is unknown.
        NoTileError: when not even one warp is allowed.
    """
    limits = limits_of(profile)
    width = padded(max(spec.head_dim_qk, spec.head_dim_v))
    row_threads = max(1, width * dtype_bytes(spec.source_dtype) // _BYTES_PER_THREAD)
    tokens = _NOMINAL_TOKENS if is_symbolic(spec.num_tokens) else max(1, int(spec.num_tokens))

    def unfitness(config: TileConfig) -> tuple[float, ...]:
        pieces = config.block_m * row_threads / (config.num_warps * limits.warp_width)
        programs = -(-tokens * spec.num_kv_heads // config.block_m)
        flight = max(pieces / _PIECES_IN_FLIGHT, _PIECES_IN_FLIGHT / pieces)
        return (flight * max(1.0, (1 - _IDLE_UNITS) * limits.compute_units / programs), -config.block_m)

    tiles = [TileConfig(m, width, warps, 1) for m in (1, 2, 4, 8, 16, 32) for warps in (1, 2, 4, 8)]
    legal, rejected = [], []
    for tile in tiles:
        threads = tile.num_warps * limits.warp_width
        if threads > limits.threads_per_cta:
            rejected.append((tile, f"threads of a CTA: {threads} exceeds the limit of {limits.threads_per_cta}"))
        else:
            legal.append(tile)
    if not legal:
        raise NoTileError(f"No kv_write tile fits: {rejected[0][1]}.", "PyTorch's indexed copy takes such a write.")
    legal.sort(key=unfitness)
    return Ranking("kv_write", tuple(legal), tuple(rejected), notes=limits.assumed)
