"""From a call and a tile to the arguments of the paged attention kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport.ir import DIMS_IN_PAIRS, TileConfig
from tcport.kernels.call import AttentionCall
from tcport.kernels.target import converts_e4m3

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def attention_arguments(call: AttentionCall, config: TileConfig) -> dict[str, Any]:
    """Everything but the outputs and the sizes that set the grid.

    Options that the call does not use are passed as None or as constants, so the compiled kernel holds no trace of
    them. Strides are read from the tensors; nothing is copied or made contiguous.
    """
    query, k, v = call.query, call.k_cache, call.v_cache
    group = int(query.shape[1]) // int(k.shape[2])
    block_main, block_rest = split_head_dim(int(k.shape[3]))
    block_v = padded(int(v.shape[3]))
    mask = call.mask
    return {
        "query": query,
        "k_cache": as_bytes(k),
        "v_cache": as_bytes(v),
        "block_table": call.block_table,
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
        "mask": None if mask is None else mask.view(torch.uint8),
        "scale": float(call.scale),
        "softcap": float(call.softcap) if call.softcap else None,
        "window": call.window,
        "chunk": call.chunk,
        "mask_columns": None if mask is None else mask.shape[1],
        **strides("query", query, ("token", "head", "dim")),
        **strides("k", k, ("page", "token", "head", "dim")),
        **strides("v", v, ("page", "token", "head", "dim")),
        **strides("table", call.block_table, ("seq", "page")),
        "lens_stride": call.seq_lens.stride(0),
        "cu_stride": 0 if call.cu_seqlens_q is None else call.cu_seqlens_q.stride(0),
        "alibi_stride": 0 if call.alibi_slopes is None else call.alibi_slopes.stride(0),
        "sinks_stride": 0 if call.sinks is None else call.sinks.stride(0),
        **scale_strides("k_scale", call.k_scale),
        **scale_strides("v_scale", call.v_scale),
        "mask_stride_token": 0 if mask is None else mask.stride(0),
        "mask_stride_key": 0 if mask is None else mask.stride(1),
        "NUM_KV_HEADS": int(k.shape[2]),
        "GROUP": group,
        "PAGE_SIZE": int(k.shape[1]),
        "DIM_QK": int(k.shape[3]),
        "DIM_V": int(v.shape[3]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_MAIN": block_main,
        "BLOCK_REST": block_rest,
        "BLOCK_V": block_v,
        "K_FORMAT": read_format(k),
        "V_FORMAT": read_format(v),
        "V_IS_K": call.v_is_view_of_k and block_v == block_main,
        "V_LIKE_K": _equal_row_strides(k, v),
        "K_TOKEN_SCALE": call.k_scale is not None and call.k_scale.dim() == 3,
        "V_TOKEN_SCALE": call.v_scale is not None and call.v_scale.dim() == 3,
        "CAUSAL": call.causal,
        "FP32": _needs_fp32(query.dtype, k.dtype, v.dtype),
        "FP16": fits_fp16(call),
        "V_PAIRS": reads_pairs(call),
    }


def head_blocks(call: AttentionCall, config: TileConfig) -> int:
    """Blocks of query rows that the query heads of one KV head fill for one token: 1 unless the group is wide."""
    group = int(call.query.shape[1]) // int(call.k_cache.shape[2])
    return -(-group // config.block_m)


def tokens_per_block(call: AttentionCall, config: TileConfig) -> int:
    """Query tokens of one sequence that one block of rows holds."""
    return max(1, config.block_m // (int(call.query.shape[1]) // int(call.k_cache.shape[2])))


def split_head_dim(dim: int) -> tuple[int, int]:
    """Powers of two that cover a head dim: one, or two where that pads less (576 = 512 + 64, 80 = 64 + 16)."""
    whole = padded(dim)
    main = whole // 2
    rest = padded(dim - main)
    return (main, rest) if main >= 16 and main + rest < whole else (whole, 0)


def padded(dim: int) -> int:
    """The power of two that a tile spans to cover ``dim``, at least 16 (the depth of a matrix instruction)."""
    return max(16, 1 << (dim - 1).bit_length())


def as_bytes(cache: Tensor) -> Tensor:
    """An 8-bit float cache as bytes (the same memory), any other as it is; see :mod:`tcport.kernels.triton_fp8`."""
    return cache.view(torch.uint8) if cache.dtype in _FP8 else cache


def format_of(cache: Tensor) -> str | None:
    """Torch's name of an 8-bit float format; None for a dtype that Triton converts by itself."""
    return str(cache.dtype).removeprefix("torch.") if cache.dtype in _FP8 else None


def read_format(cache: Tensor) -> str | None:
    """The same with the way to read it: by the hardware's own conversion where the GPU has one."""
    hardware = cache.dtype == torch.float8_e4m3fn and converts_e4m3(cache.device)
    return "float8_e4m3fn in hardware" if hardware else format_of(cache)


def strides(name: str, tensor: Tensor | None, dims: tuple[str, ...]) -> dict[str, Any]:
    """Strides of a tensor as the kernel arguments ``<name>_stride_<dim>``; zeros where there is none."""
    given = (0,) * len(dims) if tensor is None else tensor.stride()
    return {f"{name}_stride_{dim}": stride for dim, stride in zip(dims, given, strict=True)}


def int4_arguments(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None) -> dict[str, Any]:
    """What a kernel needs of the operands of :func:`tcport.kernels.int4.w4a16_matmul`."""
    depth = 8 * int(packed.shape[0])
    return {
        "x": x,
        "packed": packed,
        "scales": scales,
        "zeros": zeros,
        "rows": x.shape[0],
        **strides("x", x, ("row", "dim")),
        **strides("packed", packed, ("word", "column")),
        **strides("scales", scales, ("group", "column")),
        **strides("zeros", zeros, ("group", "column")),
        "DEPTH": depth,
        "WIDTH": int(scales.shape[1]),
        "GROUP": depth // int(scales.shape[0]),
    }


def scale_strides(name: str, scale: Tensor | None) -> dict[str, Any]:
    """Page, token and head stride of a scale: zeros where one value serves all."""
    page = token = head = 0
    if scale is not None and scale.dim() == 3:
        page, token, head = scale.stride()
    elif scale is not None and scale.dim() == 1 and scale.shape[0] != 1:
        head = scale.stride(0)
    return {f"{name}_stride_page": page, f"{name}_stride_token": token, f"{name}_stride_head": head}


def _equal_row_strides(k: Tensor, v: Tensor) -> bool:
    """Whether K and V have known and equal page, token and dim strides."""
    pairs = [(k.stride(i), v.stride(i)) for i in (0, 1, 3)]
    return all(isinstance(a, int) and isinstance(b, int) and a == b for a, b in pairs)


def fits_fp16(call: AttentionCall) -> bool:
    """Whether the products of a bf16 query are taken in fp16: 8-bit values are exact there, and bf16 is further away.

    The query's rows are scaled to fit. A scale per token of V is not: it multiplies the weights of the softmax.
    """
    exact = all(c.dtype.itemsize == 1 and c.dtype != torch.float8_e5m2fnuz for c in (call.k_cache, call.v_cache))
    scaled = call.v_scale is not None and call.v_scale.dim() == 3
    return exact and not scaled and call.query.dtype == torch.bfloat16


def reads_pairs(call: AttentionCall) -> bool:
    """Whether 8-bit values are read as words of two dims (:data:`tcport.ir.DIMS_IN_PAIRS`): they have to lie so."""
    v = call.v_cache
    if v.dtype.itemsize > 1 or call.query.dtype.itemsize > 2 or call.cu_seqlens_q is not None or call.v_is_view_of_k:
        return False
    dim, steps = int(v.shape[3]), (v.storage_offset(), *v.stride()[:3])
    even = all(isinstance(step, int) and step % 2 == 0 for step in (dim, *steps))
    return even and v.stride(3) == 1 and padded(dim) >= DIMS_IN_PAIRS


def _needs_fp32(query: torch.dtype, *caches: torch.dtype) -> bool:
    """Whether a float cache does not share the query's 16-bit dtype; quantised caches hold no more than 16 bits."""
    return any(dtype.is_floating_point and dtype.itemsize > 1 and dtype != query for dtype in caches)
