"""Query-key norm, rotary embedding and cache write in one kernel; meaning in :mod:`tcport.kernels.rope`.

Where the GPU can, an eager launch overlaps the end of the kernel before it (CUDA's programmatic dependent launch): its
programs touch no memory before all of that kernel has ended and its writes are visible (``griddepcontrol.wait``), and
only then let the next launch begin, so no two after each other are both under way, but for a start that waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport.kernels.call import Launcher, is_traced
from tcport.kernels.rope import RopeWriteCall
from tcport.kernels.target import overlaps_launches
from tcport.kernels.triton_arguments import padded, strides

VALUES = 4096
"""Of query, or of key and value, in a program: 32 heads of 128. Each of 128 threads has 32 on their way at once."""


def rope_and_write(call: RopeWriteCall, launch: Launcher) -> Tensor:
    """One program per token and block of heads: of the query, into the result; of key and value, into the caches.

    Programs of a token follow each other in one dimension of the grid, so that they read its angles, and its row of the
    projection that query, key and value are parts of, at about the same time.
    """
    query, write = call.query, call.write
    tokens, query_heads, dim = query.shape[0], int(query.shape[1]), int(query.shape[2])
    kv_heads, value_dim = int(write.k_cache.shape[2]), int(write.v_cache.shape[3])
    block_half, block_v = padded(dim // 2), padded(value_dim)
    block_q = _block(query_heads, 2 * block_half)
    block_kv = _block(kv_heads, 2 * max(2 * block_half, block_v))
    blocks = triton.cdiv(query_heads, block_q) + triton.cdiv(kv_heads, block_kv)
    out = torch.empty((tokens, query_heads, dim), dtype=query.dtype, device=query.device)
    overlapped = not is_traced(launch) and overlaps_launches(query.device)  # Inductor launches one after the other
    launch(rope_and_write_kernel)[(torch.sym_max(tokens, 1) * blocks,)](
        query=query,
        key=write.key,
        value=write.value,
        cos=call.cos,
        sin=call.sin,
        q_weight=call.q_weight,
        k_weight=call.k_weight,
        out=out,
        k_cache=write.k_cache,
        v_cache=write.v_cache,
        slot_mapping=write.slot_mapping,
        eps=float(call.eps),
        tokens=tokens,
        num_slots=write.slot_mapping.shape[0],
        num_pages=write.k_cache.shape[0],
        slot_stride=write.slot_mapping.stride(0),
        **strides("query", query, ("token", "head", "dim")),
        **strides("key", write.key, ("token", "head", "dim")),
        **strides("value", write.value, ("token", "head", "dim")),
        **strides("cos", call.cos, ("token", "dim")),
        **strides("sin", call.sin, ("token", "dim")),
        q_weight_stride=0 if call.q_weight is None else call.q_weight.stride(0),
        k_weight_stride=0 if call.k_weight is None else call.k_weight.stride(0),
        **strides("k", write.k_cache, ("page", "token", "head", "dim")),
        **strides("v", write.v_cache, ("page", "token", "head", "dim")),
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        BLOCK_Q=block_q,
        BLOCK_KV=block_kv,
        PAGE_SIZE=int(write.k_cache.shape[1]),
        HALF=dim // 2,
        DIM_V=value_dim,
        BLOCK_HALF=block_half,
        BLOCK_V=block_v,
        INTERLEAVED=call.interleaved,
        OVERLAPPED=overlapped,
        num_warps=4,
        **({"launch_pdl": True} if overlapped else {}),
    )
    return out


def _block(heads: int, values: int) -> int:
    """Heads of a program, a power of two as the values of each are."""
    return min(triton.next_power_of_2(heads), max(1, VALUES // values))


@triton.jit(do_not_specialize=["tokens", "num_slots", "num_pages", "slot_stride"])
def rope_and_write_kernel(
    query,
    key,
    value,
    cos,
    sin,
    q_weight,
    k_weight,
    out,
    k_cache,
    v_cache,
    slot_mapping,
    eps,
    tokens,
    num_slots,
    num_pages,
    slot_stride,
    query_stride_token,
    query_stride_head,
    query_stride_dim,
    key_stride_token,
    key_stride_head,
    key_stride_dim,
    value_stride_token,
    value_stride_head,
    value_stride_dim,
    cos_stride_token,
    cos_stride_dim,
    sin_stride_token,
    sin_stride_dim,
    q_weight_stride,
    k_weight_stride,
    k_stride_page,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_page,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
    QUERY_BLOCKS: tl.constexpr = (QUERY_HEADS + BLOCK_Q - 1) // BLOCK_Q
    BLOCKS: tl.constexpr = QUERY_BLOCKS + (KV_HEADS + BLOCK_KV - 1) // BLOCK_KV
    token, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    live = token < tokens
    cos_row, sin_row = cos + token * cos_stride_token, sin + token * sin_stride_token
    pair = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, :]
    first, second = (pair * 2, pair * 2 + 1) if INTERLEAVED else (pair, pair + HALF)
    if block < QUERY_BLOCKS:
        head = (block * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)[:, None]
        q_row = query + token * query_stride_token + head * query_stride_head
        q_there = (head < tl.where(live, QUERY_HEADS, 0)) & (pair < HALF)
        q_a, q_b = _rotated(
            q_row, query_stride_dim, q_there, cos_row, cos_stride_dim, sin_row, sin_stride_dim, q_weight,
            q_weight_stride, eps, live, pair, first, second, HALF, INTERLEAVED,
        )  # fmt: skip
        q_target = out + (token * QUERY_HEADS + head) * (2 * HALF)
        tl.store(q_target + first, q_a.to(out.dtype.element_ty), mask=q_there)
        tl.store(q_target + second, q_b.to(out.dtype.element_ty), mask=q_there)
    else:
        # What is read does not wait for the slot: only the stores do.
        slot = tl.load(slot_mapping + token * slot_stride, mask=token < num_slots, other=-1).to(tl.int64)
        kv_head = ((block - QUERY_BLOCKS) * BLOCK_KV + tl.arange(0, BLOCK_KV)).to(tl.int64)[:, None]
        there = kv_head < tl.where(live, KV_HEADS, 0)
        dim = tl.arange(0, BLOCK_V).to(tl.int64)[None, :]
        v_row = value + token * value_stride_token + kv_head * value_stride_head
        stored = tl.load(v_row + dim * value_stride_dim, mask=there & (dim < DIM_V), other=0.0)
        k_row = key + token * key_stride_token + kv_head * key_stride_head
        k_a, k_b = _rotated(
            k_row, key_stride_dim, there & (pair < HALF), cos_row, cos_stride_dim, sin_row, sin_stride_dim, k_weight,
            k_weight_stride, eps, live, pair, first, second, HALF, INTERLEAVED,
        )  # fmt: skip
        # Padding is -1; division would round it into the cache, so it is sorted out before it is divided.
        written = (slot >= 0) & (slot < tl.cast(num_pages, tl.int64) * PAGE_SIZE) & live
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        valid = kv_head < tl.where(written, KV_HEADS, 0)
        k_target = k_cache + page * k_stride_page + offset * k_stride_token + kv_head * k_stride_head
        tl.store(k_target + first * k_stride_dim, k_a.to(k_cache.dtype.element_ty), mask=valid & (pair < HALF))
        tl.store(k_target + second * k_stride_dim, k_b.to(k_cache.dtype.element_ty), mask=valid & (pair < HALF))
        v_target = v_cache + page * v_stride_page + offset * v_stride_token + kv_head * v_stride_head
        tl.store(v_target + dim * v_stride_dim, stored.to(v_cache.dtype.element_ty), mask=valid & (dim < DIM_V))


@triton.jit
def _rotated(
    source,
    source_stride,
    there,
    cos,
    cos_stride,
    sin,
    sin_stride,
    weight,
    weight_stride,
    eps,
    live,
    pair,
    first,
    second,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows ``[heads, pairs]`` read from ``source [heads, 1]``, normed where there is a weight, and turned.

    ``first`` and ``second`` are the two components of a pair. ``live``: the token is there, and so are its angles.
    """
    in_row = pair < tl.where(live, HALF, 0)  # of the tables and weights, which every head reads
    a = tl.load(source + first * source_stride, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + second * source_stride, mask=there, other=0.0).to(tl.float32)
    cos_a = tl.load(cos + pair * cos_stride, mask=in_row, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + pair * sin_stride, mask=in_row, other=0.0).to(tl.float32)
    if INTERLEAVED:
        cos_b, sin_b = cos_a, sin_a
    else:
        cos_b = tl.load(cos + second * cos_stride, mask=in_row, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + second * sin_stride, mask=in_row, other=0.0).to(tl.float32)
    if weight is None:
        turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    else:
        w_a = tl.load(weight + first * weight_stride, mask=in_row, other=0.0).to(tl.float32)
        w_b = tl.load(weight + second * weight_stride, mask=in_row, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        # The weights go to the angles, which all heads share.
        turned_a = (a * (w_a * cos_a) - b * (w_b * sin_a)) * scale
        turned_b = (b * (w_b * cos_b) + a * (w_a * sin_b)) * scale
    return turned_a, turned_b
