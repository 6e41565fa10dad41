"""The tile of a cache write: which tokens and elements one program moves."""

from __future__ import annotations

from typing import Protocol

from tcport.device.profile import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import Dim, TileConfig
from tcport.tiling.limits import limits_of
from tcport.tiling.optimizer import Ranking
from tcport.tiling.problem import dtype_bytes, is_symbolic, padded

# What a thread moves in one instruction, and what keeps enough of them in flight.
_BYTES_PER_THREAD = 16
_NOMINAL_TOKENS = 256


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


def rank_write_tiles(spec: Write, profile: DeviceProfile) -> Ranking:
    """Tiles of ``block_m`` tokens by ``block_n`` elements of one head (the wider of K and V, padded), best first.

    A write has no reuse: every legal tile moves the same bytes. What differs is whether each thread moves a whole
    16-byte piece and whether there are programs enough for every unit.

    Raises:
        ArgumentError: when the dtype is unknown.
        NoTileError: when not even one warp is allowed.
    """
    limits = limits_of(profile)
    width = padded(max(spec.head_dim_qk, spec.head_dim_v))
    row_threads = max(1, width * dtype_bytes(spec.source_dtype) // _BYTES_PER_THREAD)
    tokens = _NOMINAL_TOKENS if is_symbolic(spec.num_tokens) else max(1, int(spec.num_tokens))

    def unfitness(config: TileConfig) -> tuple[float, ...]:
        threads = config.num_warps * limits.warp_width
        idle = threads / (config.block_m * row_threads)
        programs = -(-tokens // config.block_m) * spec.num_kv_heads
        return (max(idle, 1 / idle), max(1.0, limits.compute_units / programs), config.block_m)

    tiles = [TileConfig(m, width, warps, 1) for m in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8)]
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
