# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""The yardstick of a case: kernels that move the bytes it must move through the block table, and compute nothing.

It is measured in the same run as what is held against it, so that time over bound means the same on any machine. It is
no strict floor: a kernel with a better order of reads may beat it by some percent.
"""

from __future__ import annotations

import functools
import itertools

import torch
import triton
import triton.language as tl

from tcport.bench.inputs import Inputs
from tcport.bench.timing import microseconds


def bound(inputs: list[Inputs]) -> float:
    """Microseconds of the fastest of several ways to read every page once, or to copy what a write writes."""
    if inputs[0].case.kind == "write":
        return microseconds(_copy, inputs)
    return min(
        microseconds(functools.partial(_read, block=block, warps=warps, per_unit=per_unit), inputs, replays=5)
        for block, warps, per_unit in itertools.product((32, 64), (2, 4, 8), (2, 4, 8))
    )


def _copy(inputs: Inputs) -> None:
    for name in ("key", "value"):
        source = inputs.arguments[name]
        cache = inputs.arguments[f"{name[0]}_cache"]
        cache.flatten(0, 1)[: source.shape[0]].copy_(source)


def _read(inputs: Inputs, block: int, warps: int, per_unit: int) -> None:
    k, v, table = (inputs.arguments[n] for n in ("k_cache", "v_cache", "block_table"))
    units = torch.cuda.get_device_properties(k.device).multi_processor_count
    parts = _parts(inputs.case.lens, block, max(1, units * per_unit // k.shape[2]), k.device)
    out = torch.empty(len(parts) * k.shape[2], device=k.device)
    read_pages[(len(out),)](
        k.view(torch.uint8) if k.dtype.itemsize == 1 else k, v.view(torch.uint8) if v.dtype.itemsize == 1 else v,
        table, parts, out, table.stride(0), k.shape[2], k.shape[3], v.shape[3],
        triton.next_power_of_2(k.shape[3]), triton.next_power_of_2(v.shape[3]), k.shape[1], block, num_warps=warps,
        num_stages=4,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _parts(lens: tuple[int, ...], block: int, number: int, device: torch.device) -> torch.Tensor:
    """Sequence, first key and the key behind the last of about ``number`` parts of much the same length, longest first.

    Lengths are known here, and planning is not timed: the yardstick is not to lose to a plan.
    """
    length = max(1, -(-sum(-(-n // block) for n in lens) // number))
    parts: list[tuple[int, int, int]] = []
    for seq, keys in enumerate(lens):
        tiles = -(-keys // block)
        count = max(1, round(tiles / length))
        edges = [min(keys, tiles * i // count * block) for i in range(count + 1)]
        parts += [(seq, begin, end) for begin, end in itertools.pairwise(edges)]
    parts.sort(key=lambda part: part[1] - part[2])
    return torch.tensor(parts, dtype=torch.int32, device=device)


@triton.jit
def read_pages(
    k_cache, v_cache, block_table, parts, out, table_stride, HEADS: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load every K and V element of a part of a sequence's pages, and use them for a sum that nobody wants."""
    part, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    seq, begin, end = tl.load(parts + part * 3), tl.load(parts + part * 3 + 1), tl.load(parts + part * 3 + 2)
    dim, dim_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    total_k, total_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        page = tl.load(block_table + seq * table_stride + key // PAGE_SIZE, mask=key < end, other=0).to(tl.int64)
        token = (page * PAGE_SIZE + key % PAGE_SIZE) * HEADS + head
        k = tl.load(k_cache + token[:, None] * D + dim[None, :], mask=(dim < D)[None, :], other=0)
        v = tl.load(v_cache + token[:, None] * D_V + dim_v[None, :], mask=(dim_v < D_V)[None, :], other=0)
        total_k += k.to(tl.float32)
        total_v += v.to(tl.float32)
    total = tl.sum(tl.sum(total_k, 1), 0) + tl.sum(tl.sum(total_v, 1), 0)
    tl.store(out + tl.program_id(0), total)
