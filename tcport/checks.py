"""Validation of the operators' arguments, by shape, dtype and device alone.

No tensor value is read, so the same functions serve real tensors, fake tensors and the ``meta["val"]`` of graph
nodes. Every refusal is a :mod:`tcport.errors` class and happens before anything is allocated, launched or written.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tcport.errors import (
    ArgumentError,
    DeviceMismatchError,
    DtypeError,
    HeadRatioError,
    ShapeError,
    TcportError,
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
    _rank("query", query, _QUERY, "Flatten batch and sequence into one token dimension, and pass cu_seqlens_q.")
    _rank("block_table", block_table, "[sequences, pages per sequence]")
    _rank("seq_lens", seq_lens, "[sequences]")
    if cu_seqlens_q is not None:
        _rank("cu_seqlens_q", cu_seqlens_q, "[sequences + 1]")
    if mask is not None:
        _rank("mask", mask, "[tokens, key positions]")

    _dtype("query", query, FLOAT_DTYPES)
    _dtype("block_table", block_table, INDEX_DTYPES)
    _dtype("seq_lens", seq_lens, INDEX_DTYPES)
    if cu_seqlens_q is not None:
        _dtype("cu_seqlens_q", cu_seqlens_q, INDEX_DTYPES)
    if mask is not None:
        _dtype("mask", mask, (torch.bool,), "A mask is True where a key is visible: convert it with mask != 0.")

    _one_device(
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
    _require(
        block_table.shape[0] == num_seqs,
        lambda: ShapeError(
            f"block_table has {block_table.shape[0]} rows and seq_lens has {num_seqs} entries; both count sequences.",
            "Pass one block_table row and one length per sequence.",
        ),
    )
    if cu_seqlens_q is None:
        _require(
            num_tokens == num_seqs,
            lambda: ShapeError(
                f"query has {num_tokens} tokens for {num_seqs} sequences, and without cu_seqlens_q there is one query "
                "token per sequence.",
                "Pass cu_seqlens_q [sequences + 1] to say which tokens belong to which sequence.",
            ),
        )
    else:
        _require(
            cu_seqlens_q.shape[0] == num_seqs + 1,
            lambda: ShapeError(
                f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries for {num_seqs} sequences; it must have one more "
                "than there are sequences.",
                "Pass the cumulative query lengths with a leading 0.",
            ),
        )
    if mask is not None:
        _require(
            mask.shape[0] == num_tokens,
            lambda: ShapeError(
                f"mask has {mask.shape[0]} rows for {num_tokens} query tokens.",
                "Pass one row per query token; column j is key position j of the token's own sequence.",
            ),
        )
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            _per_query_head(name, per_head, num_q_heads)

    for name, count in (("window", window), ("chunk", chunk), ("num_splits", num_splits)):
        if count is not None:
            _require(
                count >= 1,
                lambda name=name, count=count: ArgumentError(
                    f"{name} is {count}, and must be at least 1.", f"Pass {name}=None to leave it out."
                ),
            )
    if scale is not None:
        _finite("scale", scale, "Pass None for the default, head dim ** -0.5.")
    _finite("softcap", softcap, "Pass 0.0 to leave the logits uncapped.")
    _require(
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
    _rank("key", key, "[tokens, KV heads, head dim]")
    _rank("value", value, "[tokens, KV heads, head dim]")
    _rank("slot_mapping", slot_mapping, "[tokens]")
    _dtype("key", key, FLOAT_DTYPES)
    _dtype("value", value, FLOAT_DTYPES)
    _dtype("slot_mapping", slot_mapping, INDEX_DTYPES)
    _one_device(
        key=key,
        value=value,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    _caches(k_cache, v_cache, k_scale, v_scale)
    _require(
        key.shape[0] == value.shape[0],
        lambda: ShapeError(
            f"key has {key.shape[0]} tokens and value has {value.shape[0]}.", "Pass the same tokens in both."
        ),
    )
    _require(
        slot_mapping.shape[0] <= key.shape[0],
        lambda: ShapeError(
            f"slot_mapping has {slot_mapping.shape[0]} entries for {key.shape[0]} tokens of key and value.",
            "Pass at most one slot per token; tokens beyond the last slot are not written.",
        ),
    )
    for name, new, cache_name, cache in (("key", key, "k_cache", k_cache), ("value", value, "v_cache", v_cache)):
        for what, given, wanted in (
            ("KV heads", new.shape[1], cache.shape[2]),
            ("head dim", new.shape[2], cache.shape[3]),
        ):
            _require(
                given == wanted,
                lambda name=name, cache_name=cache_name, what=what, given=given, wanted=wanted: ShapeError(
                    f"{name} has {what} {given} and {cache_name} has {wanted}.",
                    f"Pass {name} as [tokens, KV heads, head dim] with the cache's own heads and head dim.",
                ),
            )


def check_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Refuse a ``tcport::merge_states`` call that the reference gives no meaning to.

    Arguments as in :func:`tcport.merge_states`; sizes may be symbolic.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError: as :func:`check_paged_attention`.
    """
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        _rank(name, out, "[tokens, query heads, head dim]")
        _dtype(name, out, FLOAT_DTYPES)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _rank(name, lse, "[tokens, query heads]", "Call paged_attention with return_lse=True.")
        _dtype(name, lse, (torch.float32, torch.float64), "Keep the LSE as paged_attention returns it.")
    _one_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    for a, b, what in ((out_a, out_b, "out_a and out_b"), (lse_a, lse_b, "lse_a and lse_b")):
        if a.dtype != b.dtype:
            raise DtypeError(f"{what} have dtypes {a.dtype} and {b.dtype}.", "Convert one of them to the other's.")
        _same_sizes(what, a, b)
    _same_sizes("out_a (without its last dimension) and lse_a", out_a[..., 0], lse_a)


def check_out(out: Tensor, query: Tensor, v_cache: Tensor) -> None:
    """Refuse an ``out=`` tensor that cannot hold the result ``[T, Hq, Dv]`` in the query's dtype.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError: as :func:`check_paged_attention`.
    """
    _rank("out", out, "[tokens, query heads, value head dim]")
    _dtype("out", out, (query.dtype,), "Allocate it in the dtype of the query.")
    _one_device(query=query, out=out)
    for dim, given, wanted in zip(range(3), out.shape, (*query.shape[:2], v_cache.shape[-1]), strict=True):
        _require(
            given == wanted,
            lambda dim=dim, given=given, wanted=wanted: ShapeError(
                f"out has size {given} in dimension {dim} where the result has {wanted}.",
                "Allocate out as [tokens, query heads, value head dim].",
            ),
        )


def _require(condition: bool | torch.SymBool, error: Callable[[], TcportError]) -> None:
    """Raise ``error()`` unless ``condition`` holds.

    A condition on sizes that are not known while tracing becomes a run-time assertion of the compiled code, which an
    ``if`` could not express without fixing the size.
    """
    if isinstance(condition, torch.SymBool):
        try:
            torch._check(condition, lambda: str(error()))
        except RuntimeError as failed:
            raise error() from failed
    elif not condition:
        raise error()


def _rank(name: str, tensor: Tensor, layout: str, remedy: str | None = None) -> None:
    rank = layout.count(",") + 1
    if tensor.dim() != rank:
        raise ShapeError(
            f"{name} has shape {_sizes(tensor)}, and must have {rank} dimensions, {layout}.",
            remedy or f"Reshape {name} to {layout}.",
        )


def _dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], remedy: str | None = None) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise DtypeError(
            f"{name} has dtype {tensor.dtype}; allowed: {names}.", remedy or f"Convert {name} to one of these."
        )


def _one_device(**tensors: Tensor | None) -> None:
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in given.items())
        first = next(iter(given))
        raise DeviceMismatchError(
            f"The tensors of one call must lie on one device, and these do not: {places}.",
            f"Move them to the device of {first}, {given[first]}.",
        )


def _caches(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Rules common to the reader and the writer of a cache."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _rank(name, cache, _CACHE, "Pass a view of that shape; any strides will do, nothing is copied.")
        remedy = f"View a uint8 cache as the dtype it stores, such as {name}.view(torch.float8_e4m3fn)."
        _dtype(name, cache, FLOAT_DTYPES + QUANTISED_DTYPES, remedy)
        for what, size in zip(("page size", "KV heads", "head dim"), cache.shape[1:], strict=True):
            _require(
                size >= 1,
                lambda name=name, what=what, cache=cache: ShapeError(
                    f"{name} has shape {_sizes(cache)}: its {what} must be at least 1.", f"Pass {name} as {_CACHE}."
                ),
            )
    if k_cache.dtype != v_cache.dtype:
        raise DtypeError(
            f"k_cache has dtype {k_cache.dtype} and v_cache has {v_cache.dtype}.", "Store both in one dtype."
        )
    for dim, what in enumerate(("pages", "page size", "KV heads")):
        _require(
            k_cache.shape[dim] == v_cache.shape[dim],
            lambda dim=dim, what=what: ShapeError(
                f"k_cache and v_cache disagree about {what}: {k_cache.shape[dim]} and {v_cache.shape[dim]}.",
                "Pass both as [pages, page, KV heads, head dim]; only the head dims may differ.",
            ),
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _kv_scale(name, scale, k_cache)
        elif k_cache.dtype == torch.int8:
            raise ArgumentError(
                f"The caches are int8 and {name} is missing: an int8 element has no value without a scale.",
                f"Pass {name}; 1.0 says that the stored integers are the values.",
            )


def _kv_scale(name: str, scale: Tensor, cache: Tensor) -> None:
    _dtype(name, scale, FLOAT_DTYPES)
    num_kv_heads = cache.shape[2]

    def error() -> ShapeError:
        return ShapeError(
            f"{name} has shape {_sizes(scale)} for a cache {_sizes(cache)}; allowed: [] or [1] (one for the tensor), "
            "[KV heads], or [pages, page, KV heads] (one per token and head).",
            "Reshape it to one of these.",
        )

    if scale.dim() == 1:
        size = scale.shape[0]
        _require((size == num_kv_heads) | (size == 1), error)
    elif scale.dim() == 3:
        for given, wanted in zip(scale.shape, cache.shape[:3], strict=True):
            _require(given == wanted, error)
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
    _require(
        head_dim == k_cache.shape[3],
        lambda: ShapeError(
            f"query has head dim {head_dim} and k_cache has {k_cache.shape[3]}.",
            "Pass queries and keys of one head dim.",
        ),
    )
    _require(
        num_q_heads % num_kv_heads == 0,
        lambda: HeadRatioError(
            f"query has {num_q_heads} heads and the caches have {num_kv_heads}; the first must be a multiple of the "
            "second.",
            "Pass query as [tokens, query heads, head dim] and caches as [pages, page, KV heads, head dim].",
        ),
    )


def _per_query_head(name: str, tensor: Tensor, num_q_heads: int) -> None:
    _rank(name, tensor, "[query heads]")
    _dtype(name, tensor, FLOAT_DTYPES)
    _require(
        tensor.shape[0] == num_q_heads,
        lambda: ShapeError(
            f"{name} has {tensor.shape[0]} entries for {num_q_heads} query heads.", "Pass one entry per query head."
        ),
    )


def _finite(name: str, number: float, remedy: str) -> None:
    _require(
        -math.inf < number < math.inf,
        lambda: ArgumentError(f"{name} is {number}, and must be a finite number.", remedy),
    )


def _same_sizes(what: str, a: Tensor, b: Tensor) -> None:
    for left, right in zip(a.shape, b.shape, strict=True):
        _require(
            left == right,
            lambda: ShapeError(f"{what} have shapes {_sizes(a)} and {_sizes(b)}.", "Pass results of the same tokens."),
        )


def _sizes(tensor: Tensor) -> str:
    return f"[{', '.join(str(size) for size in tensor.shape)}]"
