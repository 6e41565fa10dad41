"""What travels from the graph to a kernel: the attention asked for, the layout of the cache, the tile chosen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import sympy
import torch

Dim = int | sympy.Expr
"""A size that may be symbolic: a Python int, or a sympy expression over the graph's size symbols."""

BATCH, TOKENS, CONTEXT = (sympy.Symbol(name, integer=True, positive=True) for name in ("B", "T", "C"))
"""Sequences, query tokens of them all, and keys of the widest block table: the sizes that a tile leaves open."""

FEW_KEYS = 1024
"""Keys of the widest block table up to which a batch is not cut by its lengths, whatever :class:`TileConfig` says."""

FEW_SPLITS = 8
"""Splits of every sequence up to which few threads merge them; more are merged by a wide block.

It depends on the tile alone, not on the batch: an open number of splits counts as many, and no batch size compiles a
second merge.
"""

DIMS_IN_PAIRS = 128
"""Padded head dim of 8-bit values from which decode reads their dims in pairs: each half fills a matrix unit.

With fewer, ptxas 12.8 makes wrong code of products with half as many columns (docs/measurements.md).
"""

IntLike = TypeVar("IntLike", int, torch.SymInt)


class CeilDiv(sympy.Function):
    """``ceil(a / b)`` of integers, kept as one term so that it prints and evaluates without fractions."""

    nargs = (2,)

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if isinstance(a, sympy.Integer) and isinstance(b, sympy.Integer):
            return sympy.Integer(-(-int(a) // int(b)))
        return a if b == 1 else None


QueryForm = Literal["decode", "varlen"]
"""``decode``: one query token per sequence (no ``cu_seqlens_q``). ``varlen``: any number, as ``cu_seqlens_q`` says."""


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """How one KV cache lies in memory, in elements of its dtype.

    The logical shape is always ``[pages, page, KV heads, dim]``; a head-major, interleaved or packed
    cache is a view of that shape and differs only in these strides.
    """

    page_size: int
    stride_page: Dim
    stride_token: Dim
    stride_head: Dim
    stride_dim: Dim

    @property
    def head_major(self) -> bool | None:
        """True when the tokens of one KV head are adjacent within a page; None when strides are symbolic."""
        if not (isinstance(self.stride_token, int) and isinstance(self.stride_head, int)):
            return None
        return self.stride_token < self.stride_head


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One paged attention call, reduced to the facts that choose a kernel and a tile.

    ``num_seqs``, ``num_tokens`` and ``max_context`` may be symbolic; nothing about a single batch
    (its lengths) is in here, so one spec serves every step of a serving loop.
    """

    form: QueryForm
    num_seqs: Dim
    num_tokens: Dim
    max_context: Dim
    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    query_dtype: str
    kv_dtype: str
    k_layout: KVLayout
    v_layout: KVLayout
    causal: bool = True
    window: bool = False
    chunk: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    mask: bool = False
    kv_scales: bool = False
    num_splits: int | None = None
    batch_invariant: bool = False
    return_lse: bool = False
    v_is_view_of_k: bool = False

    @property
    def group_size(self) -> int:
        """Query heads per KV head (the GQA ratio)."""
        return self.num_q_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """The compile-time shape of one kernel.

    ``block_m`` counts packed rows (query tokens x query heads of one KV head), ``block_n`` counts
    keys. ``num_splits`` is an int or an expression in ``BATCH``, ``TOKENS`` and ``CONTEXT`` built from ``+ - *``,
    ``CeilDiv``, ``Min`` and ``Max``; 1 means no split-KV. ``parts``, of the same kind, is for kernels that can cut
    the keys of a batch by its lengths: how many parts a sequence gets on average. With 0 they give each ``num_splits``.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: Dim = 1
    parts: Dim = 0

    def splits(self, batch: IntLike, tokens: IntLike, context: IntLike) -> int | IntLike:
        """``num_splits`` for a call of these sizes, each of which may be a ``SymInt`` of a graph being traced."""
        return _evaluated(self.num_splits, batch, tokens, context)

    def parts_each(self, batch: IntLike, tokens: IntLike, context: IntLike) -> int | IntLike:
        """``parts`` for a call of these sizes; likewise."""
        return _evaluated(self.parts, batch, tokens, context)

    def parts_for(self, batch: IntLike, tokens: IntLike, context: IntLike) -> int | IntLike:
        """Parts that a sequence gets on average in a call of these sizes; 0 where each is cut into as many ``splits``.

        Every sequence may begin a part of its own, so there are two for each at least. One sequence alone has nothing
        to be balanced with, and with few keys less is lost by an uneven batch than by a merge.
        """
        alone, few = isinstance(batch, int) and batch < 2, isinstance(context, int) and context <= FEW_KEYS
        return 0 if self.parts == 0 or alone or few else _largest(2, self.parts_each(batch, tokens, context))

    def sized(self, batch: int, tokens: int, context: int) -> TileConfig:
        """It with the numbers of splits and parts of a call of these sizes."""
        parts = self.parts_for(batch, tokens, context)
        splits = 1 if parts else self.splits(batch, tokens, context)
        return dataclasses.replace(self, num_splits=int(splits), parts=int(parts))

    @property
    def uncut(self) -> TileConfig:
        """It without the numbers of splits and parts, which are no part of what is compiled."""
        return dataclasses.replace(self, num_splits=1, parts=0)

    def __str__(self) -> str:
        tail = f" splits {self.num_splits}" if self.num_splits != 1 else ""
        tail += f" parts {self.parts}" if self.parts != 0 else ""
        return f"{self.block_m}x{self.block_n} w{self.num_warps} st{self.num_stages}{tail}"


def _evaluated(size: Dim, *sizes: Any) -> Any:
    return size if isinstance(size, int) else _evaluator(size)(*(_largest(each, 1) for each in sizes))


@functools.lru_cache(maxsize=4096)
def _evaluator(expression: sympy.Expr) -> Callable[..., Any]:
    functions = {"CeilDiv": lambda a, b: (a + b - 1) // b, "Min": _smallest, "Max": _largest}
    return sympy.lambdify((BATCH, TOKENS, CONTEXT), expression, modules=[functions])


def _smallest(*sizes: Any) -> Any:
    return min(sizes) if all(type(size) is int for size in sizes) else functools.reduce(torch.sym_min, sizes)


def _largest(*sizes: Any) -> Any:
    return max(sizes) if all(type(size) is int for size in sizes) else functools.reduce(torch.sym_max, sizes)
