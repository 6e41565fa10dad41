"""Numeric self-tests: each family of tcport's Triton kernels on a small problem whose answer the reference gives.

The problem has what compilers get wrong: ragged lengths, an empty sequence, several splits, and, beside the tile that
the device would use, the largest legal one (a 128x128 reduction was once miscompiled).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from tcport.device import device_profile
from tcport.ir import FEW_SPLITS, AttentionSpec, TileConfig
from tcport.kernels import reference
from tcport.kernels.call import AttentionCall, MergeCall, WriteCall
from tcport.tiling import rank_tiles
from tcport.tiling.hopper import rank_hopper_tiles
from tcport.tiling.plan import plain_spec

_HEADS, _KV_HEADS, _DIM, _PAGE = 8, 2, 128, 16
_LENS = (0, 1, 37, 300)
_WIDTH = 128  # columns of the block table, for as many keys as a batch must hold to be cut by its lengths
_DTYPE = torch.bfloat16
_TOLERANCE = 2e-2  # of 16-bit results for unit-normal inputs


def self_tests(device: torch.device, kernel: str) -> dict[str, Callable[[], str]]:
    """Tests of a kernel by name: the kernel's, with the tile behind it where it has tiles.

    Each returns ``"right"``, or raises. There are none where the kernel is not for the device.
    """
    if kernel == "triton_write":
        return {kernel: lambda: _write(device)}
    if kernel == "triton_merge":
        return {kernel: lambda: _merge(device)}
    if kernel == "hopper_prefill" and not (device_profile(device).arch or "").startswith("sm_90"):
        return {}
    entry, q_lens = _ENTRIES[kernel]()
    tiles = _hopper_tiles(device, q_lens) if kernel == "hopper_prefill" else _tiles(device, q_lens)
    call = _problem(device, q_lens)
    return {f"{kernel} {tile}": lambda tile=tile: _attention(entry, call, tile) for tile in tiles}


def _decode() -> tuple[Callable[..., Any], tuple[int, ...]]:
    from tcport.kernels.triton_decode import paged_decode

    return paged_decode, (1,) * len(_LENS)


def _prefill() -> tuple[Callable[..., Any], tuple[int, ...]]:
    from tcport.kernels.triton_prefill import paged_prefill

    return paged_prefill, (0, 1, 5, 130)


def _hopper() -> tuple[Callable[..., Any], tuple[int, ...]]:
    from tcport.kernels.hopper_prefill import hopper_prefill

    return functools.partial(hopper_prefill, units=3), (0, 1, 37, 130)  # few, so that each takes block after block


_ENTRIES = {"triton_decode": _decode, "triton_prefill": _prefill, "hopper_prefill": _hopper}
"""By kernel: its entry and the number of query tokens of each sequence; Triton is imported when one is asked for."""


def _attention(entry: Callable[..., tuple[torch.Tensor, torch.Tensor]], call: AttentionCall, tile: TileConfig) -> str:
    """Calls whose keys are cut into many for every sequence alike and, where the kernel can, by their lengths."""
    want, _ = reference.paged_attention(
        call.query.cpu(),
        call.k_cache.cpu(),
        call.v_cache.cpu(),
        call.block_table.cpu(),
        call.seq_lens.cpu(),
        None if call.cu_seqlens_q is None else call.cu_seqlens_q.cpu(),
    )
    for parts in {tile.parts, 0}:
        out, _ = entry(call, dataclasses.replace(tile, num_splits=FEW_SPLITS + 1, parts=parts), _launch)
        _require_close(out, want)
    return "right"


def _write(device: torch.device) -> str:
    from tcport.kernels.triton_write import kv_write

    key, value = (torch.randn(5, _KV_HEADS, _DIM, device=device).to(_DTYPE) for _ in range(2))
    caches = [torch.zeros(4, _PAGE, _KV_HEADS, _DIM, device=device).to(_DTYPE) for _ in range(2)]
    slots = torch.tensor([3, -1, 17, 63, 64], device=device)
    want = [cache.cpu().clone() for cache in caches]
    kv_write(WriteCall(key, value, caches[0], caches[1], slots), _launch)
    reference.kv_write(key.cpu(), value.cpu(), want[0], want[1], slots.cpu())
    if not all(torch.equal(cache.cpu(), expected) for cache, expected in zip(caches, want, strict=True)):
        raise ValueError("wrong numbers: the cache differs from the reference")
    return "right"


def _merge(device: torch.device) -> str:
    from tcport.kernels.triton_merge import merge_states

    outs = [torch.randn(5, _HEADS, _DIM, device=device).to(_DTYPE) for _ in range(2)]
    lses = [torch.randn(5, _HEADS, device=device) for _ in range(2)]
    lses[0][2] = -torch.inf
    out, lse = merge_states(MergeCall(outs[0], lses[0], outs[1], lses[1]), _launch)
    want = reference.merge_states(outs[0].cpu(), lses[0].cpu(), outs[1].cpu(), lses[1].cpu())
    _require_close(out, want[0])
    _require_close(lse, want[1])
    return "right"


def _tiles(device: torch.device, q_lens: tuple[int, ...]) -> list[TileConfig]:
    """The best tile, the largest and the smallest, of one split each."""
    ranked = rank_tiles(_spec(_tokens(q_lens)), device_profile(device)).configs
    largest = max(ranked, key=lambda tile: (tile.block_m * tile.block_n, tile.num_stages))
    smallest = min(ranked, key=lambda tile: (tile.block_m * tile.block_n, tile.num_stages, tile.num_warps))
    return list(dict.fromkeys(dataclasses.replace(tile, num_splits=1) for tile in (ranked[0], largest, smallest)))


def _hopper_tiles(device: torch.device, q_lens: tuple[int, ...]) -> tuple[TileConfig, ...]:
    """Every tile that the Hopper kernel may have for the problem's head dim."""
    return rank_hopper_tiles(_spec(_tokens(q_lens)), device_profile(device)).configs


def _tokens(q_lens: tuple[int, ...]) -> int | None:
    """The number of query tokens as a spec has it: none where every sequence has one."""
    return None if set(q_lens) == {1} else sum(q_lens)


def _spec(tokens: int | None) -> AttentionSpec:
    dtype = str(_DTYPE).removeprefix("torch.")
    return plain_spec(
        num_q_heads=_HEADS, num_kv_heads=_KV_HEADS, dim_qk=_DIM, dim_v=_DIM, page=_PAGE, batch=len(_LENS),
        context=320, tokens=tokens, dtype=dtype, kv_dtype=dtype,
    )  # fmt: skip


def _problem(device: torch.device, q_lens: tuple[int, ...]) -> AttentionCall:
    pages = 20
    decode_form = set(q_lens) == {1}
    query = torch.randn(sum(q_lens), _HEADS, _DIM, device=device).to(_DTYPE)
    k_cache, v_cache = (
        torch.randn(pages * len(_LENS), _PAGE, _KV_HEADS, _DIM, device=device).to(_DTYPE) for _ in range(2)
    )
    table = torch.randperm(pages * len(_LENS), device=device).reshape(len(_LENS), pages).int()
    table = torch.nn.functional.pad(table, (0, _WIDTH - pages))
    lens = torch.tensor(_LENS, device=device).int()
    bounds = None if decode_form else torch.tensor([0, *q_lens], device=device).cumsum(0).int()
    return AttentionCall.of(query, k_cache, v_cache, table, lens, bounds)


def _launch(kernel: object) -> object:
    return kernel


def _require_close(got: torch.Tensor, want: torch.Tensor) -> None:
    worst = (got.cpu().double() - want.double()).abs().nan_to_num(nan=torch.inf).max().item()
    if worst > _TOLERANCE:
        raise ValueError(f"wrong numbers: off by {worst:.3g}, allowed {_TOLERANCE}")
