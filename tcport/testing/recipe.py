"""The plain facts that a batch of paged attention is built from."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

Layout = Literal["page_major", "head_major", "interleaved", "packed", "pool", "mla"]

LAYOUTS: tuple[Layout, ...] = ("page_major", "head_major", "interleaved", "packed", "pool", "mla")
"""How K and V lie in memory.

``page_major``: pages x (page, heads, dim), a tensor each; ``head_major``: pages x (heads, page, dim); ``interleaved``:
pages x {K, V} x (page, heads, dim); ``packed``: K and V of a head side by side; ``pool``: one layer's slice of a pool
of layers; ``mla``: V is a view of K's first elements.
"""

ScaleForm = Literal["none", "scalar", "one", "head", "token"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A batch without its numbers.

    Attributes:
        lens: keys of each sequence.
        q_lens: query tokens of each sequence, or None for one each without ``cu_seqlens_q``.
        uncovered: query tokens before and after those that ``cu_seqlens_q`` covers.
        heads: query heads and KV heads.
        dims: head dims of K and V.
        page: tokens per page.
        query_dtype, kv_dtype, index_dtype: as the operator takes them.
        layout: see :data:`LAYOUTS`.
        behind: elements between the end of one head and the next thing in memory.
        storage_offset: elements before the first cache element; an odd number misaligns it.
        strided_query: the query is a slice of a fused QKV projection.
        spare_columns: of the block table, beyond those of the longest sequence.
        shared_prefix: pages that all sequences long enough have in common.
        scale: the logit scale; None: the default.
        kv_scales: form of ``k_scale`` and ``v_scale``.
        mask_columns: columns of ``mask``; None: no mask.
        causal, window, chunk, softcap, alibi, sinks, num_splits, batch_invariant: as the operator takes them.
        poison: what stands in every byte that must not matter.
        seed: seed of every random number.
    """

    lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    uncovered: tuple[int, int] = (0, 0)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    page: int = 16
    query_dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int32
    layout: Layout = "page_major"
    behind: int = 0
    storage_offset: int = 0
    strided_query: bool = False
    spare_columns: int = 2
    shared_prefix: int = 0
    scale: float | None = None
    kv_scales: ScaleForm = "none"
    mask_columns: int | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    num_splits: int | None = None
    batch_invariant: bool = False
    poison: float = float("nan")
    seed: int = 0

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of both caches: the query's, unless another was asked for."""
        return self.kv_dtype or self.query_dtype

    @property
    def query_bounds(self) -> tuple[int, ...]:
        """Where the tokens of each sequence begin in the query, and where the last ones end: ``B + 1`` numbers."""
        bounds = [self.uncovered[0] if self.q_lens is not None else 0]
        for count in self.q_lens if self.q_lens is not None else (1,) * len(self.lens):
            bounds.append(bounds[-1] + count)
        return tuple(bounds)

    @property
    def num_tokens(self) -> int:
        """Rows of the query."""
        return self.query_bounds[-1] + (self.uncovered[1] if self.q_lens is not None else 0)

    def live_positions(self, sequence: int) -> range:
        """The key positions that some token of a sequence may see, as far as causality, window and chunk say.

        A range: each condition moves monotonically with the token. All others may have been freed or never written.
        """
        length = self.lens[sequence]
        count = self.query_bounds[sequence + 1] - self.query_bounds[sequence]
        if count == 0 or length == 0:
            return range(0)
        first, last = length - count, length - 1
        low, high = 0, length
        if self.window is not None:
            low = max(low, first - self.window + 1)
        if self.chunk is not None:
            low = max(low, first // self.chunk * self.chunk)
            high = min(high, (last // self.chunk + 1) * self.chunk)
        return range(low, high)
