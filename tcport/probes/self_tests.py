"""Numeric self-tests: each family of tcport's Triton kernels on a small problem whose answer the reference gives.

The problem has what compilers get wrong: ragged lengths, an empty sequence, several splits, and, beside the tile that
the device would use, the largest legal one (a 128x128 reduction was once miscompiled).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tcport.device import device_profile
from tcport.ir import TileConfig
from tcport.kernels import reference
from tcport.kernels.call import AttentionCall, MergeCall, WriteCall
from tcport.tiling import rank_tiles
from tcport.tiling.plan import plain_spec

_HEADS, _KV_HEADS, _DIM, _PAGE = 8, 2, 128, 16
_LENS = (0, 1, 37, 300)
_TOLERANCE = 2e-2  # of 16-bit results for unit-normal inputs


def decode(device: torch.device) -> str:
    """``triton_decode``."""
    from tcport.kernels.triton_decode import paged_decode

    return _attention(paged_decode, _problem(device, (1,) * len(_LENS)), None)


def prefill(device: torch.device) -> str:
    """``triton_prefill``."""
    from tcport.kernels.triton_prefill import paged_prefill

    return _attention(paged_prefill, _problem(device, (0, 1, 5, 130)), 136)


def write(device: torch.device) -> str:
    """``triton_write``."""
    from tcport.kernels.triton_write import kv_write

    key, value = (torch.randn(5, _KV_HEADS, _DIM, device=device).bfloat16() for _ in range(2))
    caches = [torch.zeros(4, _PAGE, _KV_HEADS, _DIM, device=device).bfloat16() for _ in range(2)]
    slots = torch.tensor([3, -1, 17, 63, 64], device=device)
    want = [cache.cpu() for cache in caches]
    kv_write(WriteCall(key, value, caches[0], caches[1], slots), _launch)
    reference.kv_write(key.cpu(), value.cpu(), want[0], want[1], slots.cpu())
    if not all(torch.equal(cache.cpu(), expected) for cache, expected in zip(caches, want, strict=True)):
        raise ValueError("wrong numbers: the cache differs from the reference")
    return "right"


def merge(device: torch.device) -> str:
    """``triton_merge``."""
    from tcport.kernels.triton_merge import merge_states

    outs = [torch.randn(5, _HEADS, _DIM, device=device).bfloat16() for _ in range(2)]
    lses = [torch.randn(5, _HEADS, device=device) for _ in range(2)]
    lses[0][2] = -torch.inf
    out, lse = merge_states(MergeCall(outs[0], lses[0], outs[1], lses[1]), _launch)
    want = reference.merge_states(outs[0].cpu(), lses[0].cpu(), outs[1].cpu(), lses[1].cpu())
    _require_close(out, want[0])
    _require_close(lse, want[1])
    return "right"


SELF_TESTS: dict[str, Callable[[torch.device], str]] = {
    "triton_decode": decode,
    "triton_prefill": prefill,
    "triton_write": write,
    "triton_merge": merge,
}


def _attention(entry: Callable[..., tuple[torch.Tensor, torch.Tensor]], call: AttentionCall, tokens: int | None) -> str:
    want = reference.paged_attention(
        *(x.cpu() for x in (call.query, call.k_cache, call.v_cache, call.block_table, call.seq_lens)),
        None if call.cu_seqlens_q is None else call.cu_seqlens_q.cpu(),
        num_splits=None,
    )[0]
    tiles = _tiles(call.query.device, tokens)
    for tile in tiles:
        out, _ = entry(call, tile, _launch)
        _require_close(out, want)
    return f"right with {', '.join(map(str, tiles))}"


def _tiles(device: torch.device, tokens: int | None) -> list[TileConfig]:
    """The best tile and the largest, with three splits where the kernel splits."""
    spec = plain_spec(
        num_q_heads=_HEADS, num_kv_heads=_KV_HEADS, dim_qk=_DIM, dim_v=_DIM, page=_PAGE, batch=len(_LENS),
        context=320, tokens=tokens, dtype="bfloat16", kv_dtype="bfloat16",
    )  # fmt: skip
    ranked = rank_tiles(spec, device_profile(device)).configs
    largest = max(ranked, key=lambda tile: (tile.block_m * tile.block_n, tile.num_stages))
    chosen = dict.fromkeys((ranked[0], largest))
    return [TileConfig(t.block_m, t.block_n, t.num_warps, t.num_stages, 3) for t in chosen]


def _problem(device: torch.device, q_lens: tuple[int, ...]) -> AttentionCall:
    pages = 20
    decode_form = set(q_lens) == {1}
    query = torch.randn(sum(q_lens), _HEADS, _DIM, device=device).bfloat16()
    caches = [torch.randn(pages * len(_LENS), _PAGE, _KV_HEADS, _DIM, device=device).bfloat16() for _ in range(2)]
    table = torch.randperm(pages * len(_LENS), device=device).reshape(len(_LENS), pages).int()
    bounds = torch.tensor([0, *q_lens], device=device).cumsum(0).int()
    return AttentionCall.of(
        query, *caches, table, torch.tensor(_LENS, device=device).int(), None if decode_form else bounds
    )


def _launch(kernel: object) -> object:
    return kernel


def _require_close(got: torch.Tensor, want: torch.Tensor) -> None:
    worst = (got.cpu().double() - want.double()).abs().nan_to_num(nan=torch.inf).max().item()
    if worst > _TOLERANCE:
        raise ValueError(f"wrong numbers: off by {worst:.3g}, allowed {_TOLERANCE}")
