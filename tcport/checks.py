"""Validation of the operators' arguments, by shape, dtype and device alone.

No tensor value is read, so the same functions serve real tensors, fake tensors and the ``meta["val"]`` of graph
nodes. Every refusal is a :mod:`tcport.errors` class and happens before anything is allocated, launched or written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.errors import ArgumentError, DtypeError, HeadRatioError, ShapeError
from tcport.requirements import (
    require,
    require_agreement,
    require_dtype,
    require_finite,
    require_one_device,
    require_places_of_its_own,
    require_rank,
    sizes,
)

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of queries, new keys and values, results, scales, slopes and sinks; and of a cache that is not quantised."""

QUANTISED_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
)
"""Dtypes of a quantised cache; the query may then have any float dtype."""

INDEX_DTYPES = (torch.int32, torch.int64)

_QUERY = "[tokens, query heads, head dim]"
_CACHE = "[pages, page, KV heads, head dim]"


def check_paged_attention(
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    mask: Tensor | None = None,
    chunk: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> None:
    """Refuse a ``tcport::paged_attention`` call that the reference gives no meaning to.

    Arguments as in :func:`tcport.paged_attention`; sizes may be symbolic.

    Raises:
        ShapeError: a wrong rank or size, or two tensors that disagree about a dimension.
        HeadRatioError: the query heads do not divide evenly among the KV heads.
        DtypeError: a dtype that the operator does not take in that place.
        DeviceMismatchError: tensors on several devices.
        ArgumentError: a number outside its range, or an int8 cache without a scale.
    """
    require_rank("query", query, _QUERY, "Flatten batch and sequence into one token dimension, and pass cu_seqlens_q.")
    require_rank("block_table", block_table, "[sequences, pages per sequence]")
    require_rank("seq_lens", seq_lens, "[sequences]")
    if cu_seqlens_q is not None:
        require_rank("cu_seqlens_q", cu_seqlens_q, "[sequences + 1]")
    if mask is not None:
        require_rank("mask", mask, "[tokens, key positions]")

    require_dtype("query", query, FLOAT_DTYPES)
    require_dtype("block_table", block_table, INDEX_DTYPES)
    require_dtype("seq_lens", seq_lens, INDEX_DTYPES)
    if cu_seqlens_q is not None:
        require_dtype("cu_seqlens_q", cu_seqlens_q, INDEX_DTYPES)
    if mask is not None:
        require_dtype("mask", mask, (torch.bool,), "A mask is True where a key is visible: convert it with mask != 0.")

    require_one_device(
        query=query,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        mask=mask,
    )
    _caches(k_cache, v_cache, k_scale, v_scale)
    _query_fits_cache(query, k_cache)

    num_tokens, num_q_heads, _ = query.shape
    num_seqs = seq_lens.shape[0]
    remedy = "Pass one block_table row and one length per sequence."
    require_agreement("block_table", block_table.shape[0], "seq_lens", num_seqs, "the number of sequences", remedy)
    if cu_seqlens_q is None:
        require(
            num_tokens == num_seqs,
            lambda: ShapeError(
                f"query has {num_tokens} tokens for {num_seqs} sequences, and without cu_seqlens_q there is one query "
                "token per sequence.",
                "Pass cu_seqlens_q [sequences + 1] to say which tokens belong to which sequence.",
            ),
        )
    else:
        require(
            cu_seqlens_q.shape[0] == num_seqs + 1,
            lambda: ShapeError(
                f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries for {num_seqs} sequences; it must have one more "
                "than there are sequences.",
                "Pass the cumulative query lengths with a leading 0.",
            ),
        )
    if mask is not None:
        remedy = "Pass one row per query token; column j is key position j of the token's own sequence."
        require_agreement("mask", mask.shape[0], "query", num_tokens, "the number of tokens", remedy)
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            _per_query_head(name, per_head, num_q_heads)

    for name, count in (("window", window), ("chunk", chunk), ("num_splits", num_splits)):
        if count is not None:
            require(
                count >= 1,
                lambda name=name, count=count: ArgumentError(
                    f"{name} is {count}, and must be at least 1.", f"Pass {name}=None to leave it out."
                ),
            )
    if scale is not None:
        require_finite("scale", scale, "Pass None for the default, head dim ** -0.5.")
    require_finite("softcap", softcap, "Pass 0.0 to leave the logits uncapped.")
    require(
        softcap >= 0,
        lambda: ArgumentError(
            f"softcap is {softcap}, and must be at least 0.", "Pass 0.0 to leave the logits uncapped."
        ),
    )


def check_kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Refuse a ``tcport::kv_write`` call that the reference gives no meaning to.

    Arguments as in :func:`tcport.kv_write`; sizes may be symbolic.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError, ArgumentError: as :func:`check_paged_attention`.
    """
    require_rank("key", key, "[tokens, KV heads, head dim]")
    require_rank("value", value, "[tokens, KV heads, head dim]")
    require_rank("slot_mapping", slot_mapping, "[tokens]")
    require_dtype("key", key, FLOAT_DTYPES)
    require_dtype("value", value, FLOAT_DTYPES)
    require_dtype("slot_mapping", slot_mapping, INDEX_DTYPES)
    require_one_device(
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    _caches(k_cache, v_cache, k_scale, v_scale)
    require_places_of_its_own("k_cache", k_cache)
    require_places_of_its_own("v_cache", v_cache)
    require_agreement(
        "key", key.shape[0], "value", value.shape[0], "the number of tokens", "Pass the same tokens in both."
    )
    require(
        slot_mapping.shape[0] <= key.shape[0],
        lambda: ShapeError(
            f"slot_mapping has {slot_mapping.shape[0]} entries for {key.shape[0]} tokens of key and value.",
            "Pass at most one slot per token; tokens beyond the last slot are not written.",
        ),
    )
    for name, new, cache_name, cache in (("key", key, "k_cache", k_cache), ("value", value, "v_cache", v_cache)):
        for what, given, wanted in zip(("KV heads", "head dim"), new.shape[1:], cache.shape[2:], strict=True):
            remedy = f"Pass {name} as [tokens, KV heads, head dim] with the cache's own heads and head dim."
            require_agreement(name, given, cache_name, wanted, what, remedy)


def check_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Refuse a ``tcport::merge_states`` call that the reference gives no meaning to.

    Arguments as in :func:`tcport.merge_states`; sizes may be symbolic.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError: as :func:`check_paged_attention`.
    """
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        require_rank(name, out, "[tokens, query heads, head dim]")
        require_dtype(name, out, FLOAT_DTYPES)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        require_rank(name, lse, "[tokens, query heads]", "Call paged_attention with return_lse=True.")
        require_dtype(name, lse, (torch.float32, torch.float64), "Keep the LSE as paged_attention returns it.")
    require_one_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    remedy = "Pass results over the same tokens, heads and head dim."
    for a, b, what in ((out_a, out_b, "out"), (lse_a, lse_b, "lse")):
        if a.dtype != b.dtype:
            raise DtypeError(f"{what}_a has dtype {a.dtype} and {what}_b has {b.dtype}.", "Convert one of the two.")
        for dim, (size_a, size_b) in enumerate(zip(a.shape, b.shape, strict=True)):
            require_agreement(f"{what}_a", size_a, f"{what}_b", size_b, f"dimension {dim}", remedy)
    for dim, (size_out, size_lse) in enumerate(zip(out_a.shape[:2], lse_a.shape, strict=True)):
        require_agreement("out_a", size_out, "lse_a", size_lse, f"dimension {dim}", remedy)


def check_out(out: Tensor, query: Tensor, v_cache: Tensor, dtype: torch.dtype) -> None:
    """Refuse an ``out=`` tensor that cannot hold the result ``[T, Hq, Dv]``, which has this dtype.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError, ArgumentError: as :func:`check_paged_attention`.
    """
    if query.dim() != 3 or v_cache.dim() != 4:
        return  # what the call itself is refused for
    require_rank("out", out, "[tokens, query heads, value head dim]")
    require_dtype("out", out, (dtype,), "Allocate it in the dtype of the result: the query's, under autocast its own.")
    require_one_device(query=query, out=out)
    remedy = "Allocate out as [tokens, query heads, value head dim]."
    for dim, (given, wanted) in enumerate(zip(out.shape, (*query.shape[:2], v_cache.shape[-1]), strict=True)):
        require_agreement("out", given, "the result", wanted, f"dimension {dim}", remedy)
    require_places_of_its_own("out", out)


def out_fits(out: Tensor, query: Tensor, v_cache: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`check_out` passes, as a value: Dynamo traces a comparison where it cannot trace a refusal."""
    if query.dim() != 3 or v_cache.dim() != 4 or out.dim() != 3 or out.dtype != dtype or out.device != query.device:
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        return False
    return tuple(out.shape) == (query.shape[0], query.shape[1], v_cache.shape[3])


def check_shared_pages(block_table: Tensor, shared_pages: int) -> None:
    """Refuse a number of common pages that the table does not have.

    Raises:
        ArgumentError: ``shared_pages`` is not between 0 and the columns of the table.
    """
    if block_table.dim() == 2:  # else the call itself is refused for it
        columns = block_table.shape[1]
        require(
            (shared_pages >= 0) & (shared_pages <= columns),
            lambda: ArgumentError(
                f"shared_pages is {shared_pages}; block_table has {columns} columns.",
                "Give the number of common pages.",
            ),
        )


def _caches(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Rules common to the reader and the writer of a cache."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_rank(name, cache, _CACHE, "Pass a view of that shape; any strides will do, nothing is copied.")
        remedy = f"View a uint8 cache as the dtype it stores, such as {name}.view(torch.float8_e4m3fn)."
        require_dtype(name, cache, FLOAT_DTYPES + QUANTISED_DTYPES, remedy)
        for what, size in zip(("page size", "KV heads", "head dim"), cache.shape[1:], strict=True):
            require(
                size >= 1,
                lambda name=name, what=what, cache=cache: ShapeError(
                    f"{name} has shape {sizes(cache)}: its {what} must be at least 1.", f"Pass {name} as {_CACHE}."
                ),
            )
    if k_cache.dtype != v_cache.dtype:
        raise DtypeError(
            f"k_cache has dtype {k_cache.dtype} and v_cache has {v_cache.dtype}.", "Store both in one dtype."
        )
    remedy = "Pass both as [pages, page, KV heads, head dim]; only the head dims may differ."
    for dim, what in enumerate(("pages", "page size", "KV heads")):
        require_agreement("k_cache", k_cache.shape[dim], "v_cache", v_cache.shape[dim], what, remedy)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _kv_scale(name, scale, k_cache)
        elif k_cache.dtype == torch.int8:
            raise ArgumentError(
                f"The caches are int8 and {name} is missing: an int8 element has no value without a scale.",
                f"Pass {name}; 1.0 says that the stored integers are the values.",
            )


def _kv_scale(name: str, scale: Tensor, cache: Tensor) -> None:
    require_dtype(name, scale, FLOAT_DTYPES)
    num_kv_heads = cache.shape[2]

    def error() -> ShapeError:
        return ShapeError(
            f"{name} has shape {sizes(scale)} for a cache {sizes(cache)}; allowed: [] or [1] (one for the tensor), "
            "[KV heads], or [pages, page, KV heads] (one per token and head).",
            "Reshape it to one of these.",
        )

    if scale.dim() == 1:
        size = scale.shape[0]
        require((size == num_kv_heads) | (size == 1), error)
    elif scale.dim() == 3:
        for given, wanted in zip(scale.shape, cache.shape[:3], strict=True):
            require(given == wanted, error)
    elif scale.dim() != 0:
        raise error()


def _query_fits_cache(query: Tensor, k_cache: Tensor) -> None:
    if k_cache.dtype in FLOAT_DTYPES and query.dtype != k_cache.dtype:
        raise DtypeError(
            f"query has dtype {query.dtype} and the caches have {k_cache.dtype}; a float cache needs a query of its "
            "own dtype.",
            f"Convert the query with query.to({k_cache.dtype}), or run under torch.autocast, which does so.",
        )
    num_q_heads, head_dim = query.shape[1:]
    num_kv_heads = k_cache.shape[2]
    remedy = "Pass queries and keys of one head dim."
    require_agreement("query", head_dim, "k_cache", k_cache.shape[3], "the head dim", remedy)
    require(
        num_q_heads >= 1,
        lambda: ShapeError(
            f"query has shape {sizes(query)}: it must have at least 1 head.", f"Pass query as {_QUERY}."
        ),
    )
    require(
        num_q_heads % num_kv_heads == 0,
        lambda: HeadRatioError(
            f"query has {num_q_heads} heads and the caches have {num_kv_heads}; the first must be a multiple of the "
            "second.",
            f"Pass query as {_QUERY} and caches as {_CACHE}.",
        ),
    )


def _per_query_head(name: str, tensor: Tensor, num_q_heads: int) -> None:
    require_rank(name, tensor, "[query heads]")
    require_dtype(name, tensor, FLOAT_DTYPES)
    remedy = "Pass one entry per query head."
    require_agreement(name, tensor.shape[0], "query", num_q_heads, "the number of query heads", remedy)
