"""Paged attention of several query tokens on Hopper; the device side is :mod:`tcport.kernels.hopper_attention`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall, Launcher

BLOCK_M = 128
"""Query rows of a CTA: 64, the height of a wgmma, for each of the two groups of warps."""

WARPS = 4
"""Of either group. The first is the one that a launch names; the kernel starts the others."""

SMALLEST_BOX = 8
"""Keys: rows of the pattern in which the 128 bytes of a row are swizzled."""

ALIGNMENT = 16
"""Bytes, of what TMA takes for addresses and strides."""

_MOST_ROWS = 2**31 - 1  # coordinates of a copy are signed 32-bit numbers


def hopper_prefill(
    call: AttentionCall, config: TileConfig, launch: Launcher, units: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of packed query tokens, for calls that :func:`misfit` has nothing against.

    Args:
        call: a call with ``cu_seqlens_q`` on real tensors: their addresses go into TMA descriptors.
        config: ``block_m`` is 128; ``block_n`` keys a tile; ``num_stages`` buffers of K and of V.
        launch: see :data:`tcport.kernels.call.Launcher`.
        units: multiprocessors. Where there is work for each more than twice, one CTA on each takes block after block;
            else, and where it is None, every block gets a CTA of its own.

    Returns:
        As :func:`tcport.kernels.triton_decode.paged_decode`.
    """
    from tcport.kernels.hopper_attention import hopper_attention_kernel

    query, k, v, cu_seqlens_q = call.query, call.k_cache, call.v_cache, call.cu_seqlens_q
    if cu_seqlens_q is None:
        raise ValueError("the kernel is for packed query tokens: give it cu_seqlens_q")
    num_tokens, num_heads, dim = (int(size) for size in query.shape)
    num_kv_heads = int(k.shape[2])
    group = num_heads // num_kv_heads
    out = query.new_empty(num_tokens, num_heads, dim)
    lse = query.new_empty((num_tokens, num_heads) if call.return_lse else (0,), dtype=torch.float32)
    box = box_keys(int(k.shape[1]), config.block_n)
    keys, values = Matrix.of(k), Matrix.of(v)
    # Every sequence may begin a block of its own, and so may the rows before and behind all sequences.
    blocks = num_tokens // (BLOCK_M // group) + call.seq_lens.shape[0] + 2
    items = blocks * num_kv_heads
    multiplying, fetching = registers(dim)
    shared_out = units is not None and items > 2 * units
    launch(hopper_attention_kernel)[(units if shared_out else items,)](
        keys=_descriptor(k, keys, box),
        values=_descriptor(v, values, box),
        query=query,
        block_table=call.block_table,
        seq_lens=call.seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        out=out,
        lse=lse if call.return_lse else None,
        # Of each launch's own: launches may be under way together, on several streams or in graphs that are replayed.
        counter=(query.new_zeros if shared_out else query.new_empty)(1, dtype=torch.int32),
        items=items,
        num_seqs=call.seq_lens.shape[0],
        num_tokens=num_tokens,
        sign=float((call.scale > 0) - (call.scale < 0)),
        scale=abs(float(call.scale)) or 1.0,
        window=call.window,
        query_stride_token=query.stride(0),
        query_stride_head=query.stride(1),
        k_page_rows=keys.page_rows,
        k_head_rows=keys.head_rows,
        k_head_dims=keys.head_dims,
        v_page_rows=values.page_rows,
        v_head_rows=values.head_rows,
        v_head_dims=values.head_dims,
        table_stride_seq=call.block_table.stride(0),
        table_stride_page=call.block_table.stride(1),
        lens_stride=call.seq_lens.stride(0),
        cu_stride=cu_seqlens_q.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        PAGE_SIZE=int(k.shape[1]),
        DIM=dim,
        BLOCK_N=config.block_n,
        BOX=box,
        STAGES=config.num_stages,
        CAUSAL=call.causal,
        MULTIPLYING=multiplying,
        FETCHING=fetching,
        num_warps=WARPS,
    )
    return out, lse


def registers(dim: int) -> tuple[int, int]:
    """Registers of a thread that multiplies and of one of the four warps around the one that fetches.

    A CTA of three groups of four warps has 168 for each thread, which the groups deal out anew. What multiplies holds
    more with 256 dims; what fetches has the pages of three tiles at hand, which are fewer then.
    """
    return (232, 40) if dim > 128 else (216, 72)


def misfit(call: AttentionCall) -> str | None:
    """Why these very tensors do not suit the kernel, where a call's shapes and dtypes do."""
    if call.query.stride(2) != 1:
        return "dims of the query do not lie together"
    for name, cache in (("K", call.k_cache), ("V", call.v_cache)):
        if (why := layout_misfit(cache.stride(), int(cache.shape[2]), int(cache.shape[3]))) is not None:
            return f"{name}: {why}"
        if cache.data_ptr() % ALIGNMENT:
            return f"{name} begins at an address that is no multiple of {ALIGNMENT}"
        if cache.numel() == 0 or Matrix.of(cache).rows > _MOST_ROWS:
            return f"{name} has no rows, or more than 2^31 - 1"
    return None


def layout_misfit(strides: tuple[int, ...], heads: int, dim: int) -> str | None:
    """Why a cache is no :class:`Matrix`.

    Args:
        strides: of ``[pages, page, KV heads, dim]``, in elements of 16 bits.
    """
    page, token, head, step = strides
    if step != 1:
        return f"TMA copies dims that lie together, these are {step} apart"
    if token <= 0 or token * 2 % ALIGNMENT:
        return f"a token stride of {token * 2} bytes is no multiple of TMA's {ALIGNMENT}"
    if token < dim:
        return f"tokens {token} apart overlap, of {dim} dims each"
    if page % token:
        return f"a page stride of {page} is no multiple of the token stride of {token}"
    if head % token and (heads - 1) * head + dim > token:
        return f"heads {head} apart lie neither within a token stride of {token} nor a multiple of it apart"
    return None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A cache seen as a matrix whose rows lie one token stride apart, as TMA needs it.

    Token t of page p and KV head h begins at row ``p * page_rows + h * head_rows + t``, column ``h * head_dims``.
    """

    stride: int
    page_rows: int
    head_rows: int
    head_dims: int
    rows: int
    columns: int

    @staticmethod
    def of(cache: Tensor) -> Matrix:
        """Of a cache ``[pages, page, KV heads, dim]`` of a layout that the kernel takes."""
        pages, page, heads, dim = (int(size) for size in cache.shape)
        stride_page, stride, stride_head = (int(size) for size in cache.stride()[:3])
        page_rows = stride_page // stride if pages > 1 else 0
        by_rows = heads == 1 or stride_head % stride == 0
        head_rows, head_dims = (stride_head // stride, 0) if by_rows else (0, stride_head)
        if heads == 1:
            head_rows = 0
        rows = (pages - 1) * page_rows + (heads - 1) * head_rows + page
        return Matrix(stride, page_rows, head_rows, head_dims, rows, (heads - 1) * head_dims + dim)


def box_keys(page_size: int, block_n: int) -> int:
    """Keys that one copy brings: as many as lie together in a page, and divide a tile."""
    return math.gcd(page_size, block_n)


def _descriptor(cache: Tensor, matrix: Matrix, box: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tcport.kernels.hopper_fetch import BOX_DIMS

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, [matrix.rows, matrix.columns], [matrix.stride, 1], [box, BOX_DIMS.value], layout)
