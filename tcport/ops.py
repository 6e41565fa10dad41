"""The functions users call: ``tcport.paged_attention``, ``kv_write`` and ``merge_states``.

The operators behind them are defined in :mod:`tcport.operator_library`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcport import checks
from tcport.argument_types import stand_in, wrong_type
from tcport.operator_library import result_dtype


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    mask: Tensor | None = None,
    chunk: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed query tokens over a paged KV cache.

    Queries are aligned to the end of their sequence: the last token of a sequence has position ``seq_len - 1``, and
    its key is already in the cache. All visibility conditions given hold at once. A token that sees no key gets zeros.
    Cache bytes at positions past a length and table entries past it influence nothing, whatever they hold.

    Args:
        query: ``[T, Hq, Dqk]``, the tokens of all sequences, packed; fp16, bf16, fp32 or fp64; any strides.
        k_cache: ``[pages, page, Hkv, Dqk]`` in the query's dtype, fp8 or int8. Any strides: a head-major, interleaved
            or packed cache is a view of this shape. ``Hq`` must be a multiple of ``Hkv``.
        v_cache: ``[pages, page, Hkv, Dv]``, likewise; may be a view of ``k_cache`` (MLA).
        block_table: ``[B, M]`` int32 or int64, the page ids of each sequence in order.
        seq_lens: ``[B]`` int32 or int64, keys per sequence, the query tokens' own included; 0 is allowed.
        cu_seqlens_q: ``[B + 1]`` int32 or int64: tokens ``cu[b]:cu[b + 1]`` belong to sequence b. None: one token per
            sequence, T == B.
        scale: factor of the logits; None: ``Dqk ** -0.5``.
        causal: a token sees no later position.
        window: a token sees positions ``> query position - window``: with ``causal``, ``window`` keys counting its own.
        softcap: ``c > 0`` turns a scaled logit x into ``c * tanh(x / c)``, before ALiBi and masking.
        alibi_slopes: ``[Hq]``; adds ``slope * (key position - query position)`` to the logit.
        sinks: ``[Hq]`` logits that enter the denominator once, neither scaled nor capped.
        k_scale, v_scale: a number, ``[]`` or ``[1]`` (whole cache), ``[Hkv]``, or ``[pages, page, Hkv]``: a stored
            element times its scale is the value. An int8 cache must have both.
        mask: bool ``[T, K]``, True where key position j of the token's own sequence is visible; beyond K none is.
        chunk: a token sees only positions of its own chunk of ``chunk`` positions.
        num_splits: number of parts the keys are split into; None: chosen. Results agree up to rounding.
        batch_invariant: a token's result does not depend, to the bit, on what else is in the batch.
        return_lse: also return the natural logarithm of the softmax denominator, sink included.
        out: contiguous or strided ``[T, Hq, Dv]`` in the dtype of the result, written and returned.

    Returns:
        ``out [T, Hq, Dv]`` in the query's dtype (under autocast in the cache's, or autocast's own where the cache is
        quantised), contiguous unless ``out`` was given; with ``return_lse`` the pair
        ``(out, lse [T, Hq] fp32)``. LSE is -inf where a token sees no key (the sink's logit, if there is a sink).

    Raises:
        ShapeError, HeadRatioError, DtypeError, DeviceMismatchError, ArgumentError: see
            :func:`tcport.checks.check_paged_attention`.
        UnsupportedFeatureError: when a gradient is asked for through the result.
    """
    # Most eager calls, in few steps: types that need no look, and no options for the dispatcher to take apart.
    if (
        not torch.compiler.is_compiling()
        and (Tensor is type(query) is type(k_cache) is type(v_cache) is type(block_table) is type(seq_lens))
        and (cu_seqlens_q is None or type(cu_seqlens_q) is Tensor)
        and (None is scale is window is chunk is num_splits is k_scale is v_scale)
        and (None is alibi_slopes is sinks is mask is out)
        and (causal is True and type(softcap) is float and softcap == 0.0)
        and (batch_invariant is False and return_lse is False)
    ):
        return torch.ops.tcport.paged_attention.default(query, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)[0]
    wrong = wrong_type(
        query=query,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        mask=mask,
        chunk=chunk,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        out=out,
    )
    if wrong is not None:
        torch.ops.tcport.refuse_type.default(*wrong)
        return stand_in(query, v_cache, return_lse)
    takes_out = out is not None and checks.out_fits(out, query, v_cache, result_dtype(query, k_cache))
    if out is not None and not takes_out:
        torch.ops.tcport.check_out.default(out, query, v_cache, result_dtype(query, k_cache))
    result, lse = torch.ops.tcport.paged_attention.default(
        query,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=_scale_tensor(k_scale, query),
        v_scale=_scale_tensor(v_scale, query),
        mask=mask,
        chunk=chunk,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )
    if out is not None and takes_out:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> None:
    """Write the keys and values of new tokens into their cache slots, in place.

    Slot ``s`` is position ``s % page`` of page ``s // page``. Tokens whose slot is negative or past the cache, and
    tokens past the end of ``slot_mapping``, are not written. Where two tokens name one slot, it is not specified which
    of them it holds. The stored values carry no gradient.

    Args:
        key: ``[T, Hkv, Dqk]``, any float dtype, any strides; may be rows of a cache, which are read before any is
            written.
        value: ``[T, Hkv, Dv]``, likewise.
        k_cache, v_cache: as in :func:`paged_attention`.
        slot_mapping: ``[S]`` int32 or int64, S <= T.
        k_scale, v_scale: as in :func:`paged_attention`. What is stored is ``x / scale``, rounded to the cache's dtype
            (int8: to nearest even; fp8 and int8 saturate).

    Raises:
        ShapeError, DtypeError, DeviceMismatchError, ArgumentError: see :func:`tcport.checks.check_kv_write`.
    """
    wrong = wrong_type(
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if wrong is not None:
        torch.ops.tcport.refuse_type.default(*wrong)
        return
    torch.ops.tcport.kv_write.default(
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale=_scale_tensor(k_scale, key),
        v_scale=_scale_tensor(v_scale, key),
    )


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        out_a, out_b: ``[T, Hq, D]``, one dtype.
        lse_a, lse_b: ``[T, Hq]`` fp32 or fp64, as ``paged_attention(..., return_lse=True)`` gives them; at most one
            of the two may include a sink. A part that is -inf contributes nothing, whatever its ``out`` holds.

    Returns:
        ``out [T, Hq, D]`` in the dtype of ``out_a`` and ``lse [T, Hq]`` in the dtype of ``lse_a``.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError: see :func:`tcport.checks.check_merge_states`.
        ArgumentError: something that is no tensor.
    """
    wrong = wrong_type(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if wrong is not None:
        torch.ops.tcport.refuse_type.default(*wrong)
        return out_a, lse_a
    return torch.ops.tcport.merge_states.default(out_a, lse_a, out_b, lse_b)


def _scale_tensor(scale: Tensor | float | None, like: Tensor) -> Tensor | None:
    """A number becomes a tensor before it reaches the graph, where each new number would be a new graph.

    A product, because torch.compile lifts a changing float out of a product; ``torch.full`` would fix its value.
    """
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.ones((), dtype=torch.float32, device=like.device) * scale
