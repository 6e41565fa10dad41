"""Merging the partial results of a split softmax (FlashAttention, arXiv:2205.14135, section 3.1).

Where the GPU can, the merge is launched while the attention kernel runs (CUDA's programmatic dependent launch), so that
its start is not waited for. Its programs touch no memory before all of the attention kernel has ended and its writes
are visible (``griddepcontrol.wait``). No other two kernels overlap by that: the attention kernel is launched as any
other, after all before it; and what is launched behind the merge waits for the merge, of which every program has
waited for the attention kernel. Scratch memory, lengths and caches may be written before and after as without it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport.kernels.call import Launcher
from tcport.kernels.triton_partial import NOTHING, PLACE, in_record, lse_of, record_words, unpack

_FEW_AT_ONCE = 16
_MANY_AT_ONCE = 64
_WIDE_WARPS = 4
_WIDE_TILE = 8192  # numbers at a time, of which a thread holds 64


def combine(
    scratch: Tensor,
    num_splits: int | torch.SymInt | None,
    out: Tensor,
    lse: Tensor | None,
    num_warps: int,
    launch: Launcher,
    *,
    wide: bool = False,
    overlapped: bool = False,
) -> None:
    """Write the attention over all keys, from the results over each split of them.

    Args:
        scratch: int64, records of :mod:`tcport.kernels.triton_partial` in the order that
            :mod:`tcport.kernels.triton_attention` writes.
        num_splits: of every sequence; None: scratch memory begins with each sequence's parts, and a token of one part
            is left as it is.
        out: ``[T, Hq, Dv]``, contiguous, written. lse: ``[T, Hq]`` fp32, contiguous, written; None: not wanted.
        num_warps: of a program, where it is not ``wide``.
        wide: read up to 64 splits at once, with 4 warps. Measured on an H200, attention and merge: 33 splits of one
            sequence of 8192 keys take 14.2 us instead of 15.9, and 64 take 13.8 instead of 16.9. Few splits or parts
            take longer by it: 8 sequences of 2048 keys 22.5 us instead of 22.1 in 8 splits, 24.0 instead of 23.6 in
            parts.
        overlapped: the attention kernel before it was launched with ``MERGED``.
    """
    num_rows, v_dim = out.shape[0] * out.shape[1], int(out.shape[2])
    block_v = triton.next_power_of_2(v_dim)
    launch(combine_kernel)[(torch.sym_max(num_rows, 1),)](
        scratch=scratch,
        out=out,
        lse=lse,
        num_rows=num_rows,
        num_splits=0 if num_splits is None else num_splits,
        NUM_HEADS=int(out.shape[1]),
        DIM_V=v_dim,
        BLOCK_V=block_v,
        BLOCK_S=max(_FEW_AT_ONCE, min(_MANY_AT_ONCE, _WIDE_TILE // block_v)) if wide else _FEW_AT_ONCE,
        RECORD=record_words(int(out.shape[1]), v_dim),
        PARTS=num_splits is None,
        OVERLAPPED=overlapped,
        num_warps=_WIDE_WARPS if wide else num_warps,
        **({"launch_pdl": True} if overlapped else {}),
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"], do_not_specialize_on_alignment=["lse"])
def combine_kernel(
    scratch,
    out,
    lse,
    num_rows,
    num_splits,
    NUM_HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    RECORD: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One (token, head) row; splits in blocks, so that their number may be anything."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    row = tl.program_id(0).to(tl.int64)
    if row >= num_rows:
        return
    token, head, apart = row // NUM_HEADS, row % NUM_HEADS, num_rows // NUM_HEADS
    first = token
    if PARTS:
        first, num_splits = unpack(tl.load(scratch + token * PLACE), tl.int32)
        # Of no more than one: a sequence whose parts no program has counted keeps what debug mode filled its row with.
        if num_splits <= 1:
            return
        scratch += apart * PLACE
        first, apart = first.to(tl.int64), 1
    dim = tl.arange(0, BLOCK_V)
    total = tl.zeros([BLOCK_V], tl.float32)
    denominator = 0.0
    maximum = float("-inf")
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        softmax, values = in_record(scratch, split.to(tl.int64) * apart + first, head, NUM_HEADS, DIM_V, RECORD)
        part_maximum, part_sum = unpack(tl.load(softmax, mask=split < num_splits, other=NOTHING), tl.float32)
        part = tl.load(
            values[:, None] + dim[None, :], mask=(split < num_splits)[:, None] & (dim < DIM_V)[None, :], other=0.0
        )
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = part_sum * tl.exp2(part_maximum - reference)
        rescale = tl.exp2(maximum - reference)
        total = total * rescale + tl.sum(part * weight[:, None], 0)
        denominator = denominator * rescale + tl.sum(weight, 0)
        maximum = new_maximum
    result = total / tl.where(denominator > 0, denominator, 1.0)
    tl.store(out + row * DIM_V + dim, result.to(out.dtype.element_ty), mask=dim < DIM_V)
    if lse is not None:
        tl.store(lse + row, lse_of(maximum, denominator))
