"""Tiles of the C++ kernels: sizes that keep a task's operands in a core's own caches."""

from __future__ import annotations

import dataclasses

from tcport.device import DeviceProfile
from tcport.ir import AttentionSpec
from tcport.tiling.problem import dtype_bytes

_L2_BYTES = 512 << 10  # where the profile does not know: the smallest of current server cores
_STREAM_BYTES = 32 << 10
_MOST = 128


@dataclasses.dataclass(frozen=True)
class CpuTile:
    """How the C++ kernels cut a call. None of it changes which keys a row is merged from, or in which order.

    Attributes:
        rows: packed rows (query tokens x heads of one KV head) of a task.
        keys: keys of a block that is packed for a matrix product.
        stream_rows: up to this many rows, keys stream past the rows from where they lie instead.
        stream_keys: keys of a block that is streamed.
        piece: keys of a task, where rows are few; threads share a long sequence in pieces of this length.
    """

    rows: int
    keys: int
    stream_rows: int
    stream_keys: int
    piece: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.keys} stream {self.stream_rows}x{self.stream_keys} piece {self.piece}"


def cpu_tile(spec: AttentionSpec, profile: DeviceProfile) -> CpuTile:
    """The tile for a spec on a CPU.

    The matrix kernel holds queries, scores, sums and the packed keys and values of a block in fp32: rows and keys are
    halved until these fit three quarters of the core's L2. The streaming kernel reads a block of about 32 KiB, and has
    the next one fetched into L2 meanwhile. Pieces are shorter where more cores have to share a sequence.
    """
    dims = spec.head_dim_qk + spec.head_dim_v
    budget = 3 * (profile.l2_bytes or _L2_BYTES) // 4
    rows = keys = _MOST
    while 4 * (rows * dims + rows * keys + keys * dims) > budget and rows > 32:
        rows, keys = (rows, keys // 2) if keys >= rows else (rows // 2, keys)
    stream_keys = _STREAM_BYTES // (dims * dtype_bytes(spec.kv_dtype))
    return CpuTile(
        rows=rows,
        keys=keys,
        stream_rows=8,
        stream_keys=min(max(_power_of_two(stream_keys), 16), _MOST),
        piece=512 if (profile.compute_units or 1) < 16 else 256,
    )


def _power_of_two(size: int) -> int:
    """The largest power of two that is not above ``size``."""
    return 1 << max(size, 1).bit_length() - 1
