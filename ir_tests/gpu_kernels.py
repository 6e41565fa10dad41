"""Running the Triton kernels on a GPU in tests: the usual problems, tiles and tolerances."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from paged_cases import Case, build, check

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall, MergeCall, WriteCall

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
TOLERANCE = {FP32: 1e-5, FP16: 1e-3, BF16: 6e-3}

LENS = (37, 0, 300, 1, 129, 16)
Q_LENS = (5, 1, 150, 1, 3, 0)
DECODE = Case(LENS, heads=(8, 2), dims=(64, 64))
VARLEN = Case(LENS, Q_LENS, heads=(8, 2), dims=(64, 64), uncovered=(3, 5))
DECODE_TILE = TileConfig(16, 32, 2, 3)
VARLEN_TILE = TileConfig(64, 32, 4, 2)


def tile_of(case: Case) -> TileConfig:
    return DECODE_TILE if case.q_lens is None else VARLEN_TILE


def verify(case: Case, config: TileConfig, tolerance: float | None = None) -> None:
    """Compare the kernel of a case's form with the reference."""
    call = build(case, "cuda")
    check(call, *attend(call, config), TOLERANCE[case.dtype] if tolerance is None else tolerance)


def of_any_size(call: AttentionCall) -> AttentionCall:
    """The call with queries of sizes from next to nothing to as much as their dtype, or an LSE in fp32, holds."""
    largest = 1e4 if call.query.dtype == FP16 else 1e30
    sizes = torch.tensor([1 / largest, 1.0, largest, 300.0, 0.0, largest**0.5])
    sizes = sizes.repeat(len(call.query) // len(sizes) + 1)[: len(call.query), None, None]
    return dataclasses.replace(call, query=call.query * sizes.to(call.query))


def attend(call: AttentionCall, config: TileConfig) -> tuple[torch.Tensor, torch.Tensor]:
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    with _poisoned_allocations():
        return (paged_decode if call.cu_seqlens_q is None else paged_prefill)(call, config, lambda kernel: kernel)


def write(call: WriteCall, tile: TileConfig | None = None) -> None:
    from tcport.kernels.triton_write import WRITE_TILE, kv_write

    kv_write(call, lambda kernel: kernel, tile or WRITE_TILE)


def merge(call: MergeCall) -> tuple[torch.Tensor, torch.Tensor]:
    from tcport.kernels.triton_merge import merge_states

    with _poisoned_allocations():
        return merge_states(call, lambda kernel: kernel)


@contextlib.contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """Fill what torch allocates with NaN, so that nothing unwritten can look right."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
