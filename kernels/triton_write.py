"""Writing new keys and values into their cache slots, quantised to what the cache stores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tcport.ir import TileConfig
from tcport.kernels.call import Launcher, WriteCall
from tcport.kernels.triton_arguments import as_bytes, format_of, padded, scale_strides, strides
from tcport.kernels.triton_fp8 import encode

WRITE_TILE = TileConfig(block_m=16, block_n=128, num_warps=4, num_stages=1)
"""16 rows: at head dim 128 in 16 bits every thread moves 16 bytes of K and of V twice. For calls by hand: what the
chain runs is ranked (:func:`tcport.tiling.rank_write_tiles`)."""


def kv_write(call: WriteCall, launch: Launcher, config: TileConfig = WRITE_TILE) -> None:
    """Write keys and values, in place; meaning as in :func:`tcport.kernels.reference.kv_write`.

    Args:
        config: ``block_m`` counts rows, a row being one head of one token, whole whatever ``block_n`` is.
    """
    num_slots, num_heads = call.slot_mapping.shape[0], int(call.k_cache.shape[2])
    key_dim, value_dim = int(call.k_cache.shape[3]), int(call.v_cache.shape[3])
    blocks = (num_slots * num_heads + config.block_m - 1) // config.block_m
    launch(kv_write_kernel)[(torch.sym_max(blocks, 1),)](
        key=call.key,
        value=call.value,
        k_cache=as_bytes(call.k_cache),
        v_cache=as_bytes(call.v_cache),
        slot_mapping=call.slot_mapping,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
        num_slots=num_slots,
        num_pages=call.k_cache.shape[0],
        slot_stride=call.slot_mapping.stride(0),
        **strides("key", call.key, ("token", "head", "dim")),
        **strides("value", call.value, ("token", "head", "dim")),
        **strides("k", call.k_cache, ("page", "token", "head", "dim")),
        **strides("v", call.v_cache, ("page", "token", "head", "dim")),
        **scale_strides("k_scale", call.k_scale),
        **scale_strides("v_scale", call.v_scale),
        NUM_HEADS=num_heads,
        PAGE_SIZE=int(call.k_cache.shape[1]),
        DIM_K=key_dim,
        DIM_V=value_dim,
        BLOCK_K=padded(key_dim),
        BLOCK_V=padded(value_dim),
        BLOCK_M=config.block_m,
        K_FORMAT=format_of(call.k_cache),
        V_FORMAT=format_of(call.v_cache),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(
    do_not_specialize=["num_slots", "num_pages", "slot_stride"],
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def kv_write_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    num_slots,
    num_pages,
    slot_stride,
    key_stride_token,
    key_stride_head,
    key_stride_dim,
    value_stride_token,
    value_stride_head,
    value_stride_dim,
    k_stride_page,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_page,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    k_scale_stride_page,
    k_scale_stride_token,
    k_scale_stride_head,
    v_scale_stride_page,
    v_scale_stride_token,
    v_scale_stride_head,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
):
    """``BLOCK_M`` rows (token, head) of K and of V."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    slot = tl.load(slot_mapping + token * slot_stride, mask=token < num_slots, other=-1).to(tl.int64)
    # Padding is -1; division would round it into the cache, so it is sorted out before it is divided.
    valid = (slot >= 0) & (slot < tl.cast(num_pages, tl.int64) * PAGE_SIZE)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    _write_rows(
        key + token * key_stride_token + head * key_stride_head, key_stride_dim,
        k_cache + page * k_stride_page + offset * k_stride_token + head * k_stride_head, k_stride_dim,
        k_scale, page * k_scale_stride_page + offset * k_scale_stride_token + head * k_scale_stride_head,
        valid, DIM_K, BLOCK_K, K_FORMAT,
    )  # fmt: skip
    _write_rows(
        value + token * value_stride_token + head * value_stride_head, value_stride_dim,
        v_cache + page * v_stride_page + offset * v_stride_token + head * v_stride_head, v_stride_dim,
        v_scale, page * v_scale_stride_page + offset * v_scale_stride_token + head * v_scale_stride_head,
        valid, DIM_V, BLOCK_V, V_FORMAT,
    )  # fmt: skip


@triton.jit
def _write_rows(
    source,
    source_stride,
    target,
    target_stride,
    scale,
    scale_offset,
    valid,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):
    dim = tl.arange(0, BLOCK)
    mask = valid[:, None] & (dim < DIM)[None, :]
    x = tl.load(source[:, None] + dim[None, :].to(tl.int64) * source_stride, mask=mask, other=0.0)
    stored: tl.constexpr = target.dtype.element_ty
    has_fp64: tl.constexpr = source.dtype.element_ty == tl.float64 or stored == tl.float64
    wide: tl.constexpr = tl.float64 if has_fp64 else tl.float32  # type: ignore
    if scale is not None:
        divisor = tl.load(scale + scale_offset, mask=valid, other=1.0).to(wide)[:, None]
        # Rounded to nearest: an approximate quotient would land on the other side of a rounding boundary.
        x = tl.div_rn(x.to(wide), divisor) if wide == tl.float32 else x.to(wide) / divisor
    if FORMAT is not None:
        x = encode(x.to(tl.float32), FORMAT)
    elif stored == tl.int8:
        x = nearest_int8(x.to(wide))
    elif x.dtype != stored:
        x = x.to(wide)
    tl.store(target[:, None] + dim[None, :].to(tl.int64) * target_stride, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def nearest_int8(x):
    """Rounded to nearest even and saturated.

    Adding 1.5 * 2^23 (2^52 for fp64) leaves the integer, in two's complement, in the low bits of the float.
    """
    limited = tl.minimum(tl.maximum(x, -128.0), 127.0)
    if x.dtype == tl.float64:
        bits = (limited + 6755399441055744.0).to(tl.int64, bitcast=True)
    else:
        bits = (limited + 12582912.0).to(tl.int32, bitcast=True)
    return bits.to(tl.int8)
