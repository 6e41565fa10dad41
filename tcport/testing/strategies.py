"""Hypothesis strategies over everything a paged attention call may look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from tcport.testing.batch import PagedBatch, build_batch
from tcport.testing.recipe import LAYOUTS, Layout, Recipe

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
HEADS = ((1, 1), (2, 2), (4, 1), (6, 2), (7, 1), (10, 2), (12, 2), (9, 3))
DIMS = (8, 16, 40, 64, 80, 96, 112)
PAGES = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64)


def paged_batches(**choices: Any) -> st.SearchStrategy[PagedBatch]:
    """Batches with poison in every byte that must not matter; arguments as :func:`recipes`."""
    return recipes(**choices).map(build_batch)


@st.composite
def recipes(
    draw: st.DrawFn,
    *,
    forms: Sequence[str] = ("decode", "varlen"),
    query_dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    quantised_dtypes: Sequence[torch.dtype] = QUANTISED_DTYPES,
    heads: Sequence[tuple[int, int]] = HEADS,
    dims: Sequence[int] = DIMS,
    pages: Sequence[int] = PAGES,
    layouts: Sequence[Layout] = LAYOUTS,
    max_sequences: int = 4,
    max_length: int = 80,
    max_query: int = 9,
) -> Recipe:
    """Recipes of small batches: any lengths from 0, any page, ratio, dims and layout, options alone and together.

    Args:
        forms: "decode" (one query token per sequence), "varlen".
        query_dtypes: dtypes of the query.
        quantised_dtypes: dtypes of the cache where it is not the query's; empty: never.
        heads: pairs of query and KV heads.
        dims: head dims.
        pages: page sizes.
        layouts: see :data:`tcport.testing.LAYOUTS`.
        max_sequences, max_length, max_query: bounds on the batch, on keys and on query tokens of a sequence.
    """
    page = draw(st.sampled_from(pages))
    near_pages = [n for n in (page - 1, page, page + 1, 2 * page) if 0 <= n <= max_length]
    length = st.integers(0, max_length) | st.sampled_from([0, 1, *near_pages])
    lens = tuple(draw(st.lists(length, max_size=max_sequences)))
    varlen = draw(st.sampled_from(forms)) == "varlen"
    q_lens = tuple(draw(st.integers(0, max_query)) for _ in lens) if varlen else None
    k_dim, v_dim = draw(st.sampled_from(dims)), draw(st.sampled_from(dims))
    layout = draw(st.sampled_from(layouts))
    kv_dtype = draw(st.none() | st.sampled_from(quantised_dtypes)) if quantised_dtypes else None
    scales = ("scalar", "one", "head", "token")
    options = draw(st.sets(st.sampled_from(_OPTIONS)))

    def option(name: str, values: st.SearchStrategy[Any], default: Any = None) -> Any:
        return draw(values) if name in options else default

    return Recipe(
        lens=lens,
        q_lens=q_lens,
        uncovered=draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) if varlen else (0, 0),
        heads=draw(st.sampled_from(heads)),
        dims=(max(k_dim, v_dim), min(k_dim, v_dim)) if layout == "mla" else (k_dim, v_dim),
        page=page,
        query_dtype=draw(st.sampled_from(query_dtypes)),
        kv_dtype=kv_dtype,
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        layout=layout,
        behind=draw(st.sampled_from([0, 0, 1, 16])),
        storage_offset=draw(st.sampled_from([0, 0, 1, 7, 64])),
        strided_query=draw(st.booleans()),
        # Some kernels cut a batch by its lengths where the table has room for long sequences.
        spare_columns=draw(st.sampled_from([2, 2 + 1024 // page])),
        shared_prefix=draw(st.integers(0, 2)),
        scale=option("scale", st.sampled_from([0.05, 0.3])),
        kv_scales=draw(st.sampled_from(scales if kv_dtype == torch.int8 else ("none", *scales))),
        mask_columns=option("mask", st.sampled_from([0, 1, max(lens, default=0), max_length])),
        causal="bidirectional" not in options,
        window=option("window", st.integers(1, 2 * page + 1)),
        chunk=option("chunk", st.integers(1, 2 * page + 1)),
        softcap=option("softcap", st.sampled_from([1.5, 30.0]), 0.0),
        alibi="alibi" in options,
        sinks="sinks" in options,
        num_splits=option("num_splits", st.integers(1, 5)),
        batch_invariant="batch_invariant" in options,
        poison=draw(st.sampled_from([float("nan"), float("inf"), float("-inf")])),
        seed=draw(st.integers(0, 2**16)),
    )


_OPTIONS = (
    "scale",
    "mask",
    "bidirectional",
    "window",
    "chunk",
    "softcap",
    "alibi",
    "sinks",
    "num_splits",
    "batch_invariant",
)
