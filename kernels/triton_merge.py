"""Attention over the union of two disjoint key sets, from the results over each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport.ir import TileConfig
from tcport.kernels.call import Launcher, MergeCall
from tcport.kernels.triton_arguments import padded, strides

MERGE_TILE = TileConfig(block_m=16, block_n=1, num_warps=4, num_stages=1)


def merge_states(call: MergeCall, launch: Launcher, config: TileConfig = MERGE_TILE) -> tuple[Tensor, Tensor]:
    """Meaning, arguments and results as in :func:`tcport.kernels.reference.merge_states`.

    Args:
        config: ``block_m`` counts rows, a row being one head of one token; ``block_n`` is not used.
    """
    num_tokens, num_heads, dim = call.out_a.shape
    out = call.out_a.new_empty(num_tokens, num_heads, dim)
    lse = call.lse_a.new_empty(num_tokens, num_heads)
    num_rows = num_tokens * num_heads
    launch(merge_states_kernel)[(torch.sym_max((num_rows + config.block_m - 1) // config.block_m, 1),)](
        out_a=call.out_a,
        lse_a=call.lse_a,
        out_b=call.out_b,
        lse_b=call.lse_b,
        out=out,
        lse=lse,
        num_rows=num_rows,
        **strides("a", call.out_a, ("token", "head", "dim")),
        **strides("b", call.out_b, ("token", "head", "dim")),
        **strides("lse_a", call.lse_a, ("token", "head")),
        **strides("lse_b", call.lse_b, ("token", "head")),
        NUM_HEADS=int(num_heads),
        DIM=int(dim),
        BLOCK=padded(int(dim)),
        BLOCK_M=config.block_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, lse


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lse_a", "lse_b", "lse"])
def merge_states_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_rows,
    a_stride_token,
    a_stride_head,
    a_stride_dim,
    b_stride_token,
    b_stride_head,
    b_stride_dim,
    lse_a_stride_token,
    lse_a_stride_head,
    lse_b_stride_token,
    lse_b_stride_head,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """``BLOCK_M`` rows (token, head), in fp32, or in fp64 where an argument is."""
    has_fp64: tl.constexpr = lse.dtype.element_ty == tl.float64 or out.dtype.element_ty == tl.float64
    precision: tl.constexpr = tl.float64 if has_fp64 else tl.float32  # type: ignore
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < num_rows
    token, head = row // NUM_HEADS, row % NUM_HEADS
    at_a = lse_a + token * lse_a_stride_token + head * lse_a_stride_head
    at_b = lse_b + token * lse_b_stride_token + head * lse_b_stride_head
    log_a = tl.load(at_a, mask=valid, other=0.0).to(precision)
    log_b = tl.load(at_b, mask=valid, other=0.0).to(precision)
    largest = tl.maximum(log_a, log_b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # both sets are empty: weights 0, not NaN
    weight_a = tl.exp(log_a - largest)
    weight_b = tl.exp(log_b - largest)
    total = weight_a + weight_b
    share = 1.0 / tl.where(total > 0, total, 1.0)

    dim = tl.arange(0, BLOCK)
    inside = valid[:, None] & (dim < DIM)[None, :]
    rows_a = out_a + token * a_stride_token + head * a_stride_head
    rows_b = out_b + token * b_stride_token + head * b_stride_head
    # The output beside an LSE of -inf may hold anything, NaN included: it is not read.
    inside_a = inside & (log_a > float("-inf"))[:, None]
    inside_b = inside & (log_b > float("-inf"))[:, None]
    a = tl.load(rows_a[:, None] + dim[None, :].to(tl.int64) * a_stride_dim, mask=inside_a, other=0.0).to(precision)
    b = tl.load(rows_b[:, None] + dim[None, :].to(tl.int64) * b_stride_dim, mask=inside_b, other=0.0).to(precision)
    merged = a * (weight_a * share)[:, None] + b * (weight_b * share)[:, None]
    tl.store(out + row[:, None] * DIM + dim[None, :], merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, (largest + tl.log(total)).to(lse.dtype.element_ty), mask=valid)
