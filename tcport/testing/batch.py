"""A batch of paged attention with its numbers, and poison in every byte that must not matter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from tcport.kernels import reference
from tcport.testing.closeness import assert_close
from tcport.testing.recipe import Recipe

_STRAY_PAGES = (-1, 2**31 - 1, -(2**31), 1 << 20)
"""Page ids that stand where a table row has no page: no kernel may follow them."""


@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """Arguments of one call and the facts they were built from.

    Attributes:
        recipe: the facts.
        arguments: keyword arguments of :func:`tcport.paged_attention`, ``return_lse`` left out.
    """

    recipe: Recipe
    arguments: dict[str, Any]

    def reference(self) -> tuple[Tensor, Tensor]:
        """The right ``out [T, Hq, Dv]`` and ``lse [T, Hq]``, in fp64 on the CPU."""
        arguments = to_device(self.arguments, "cpu")
        del arguments["num_splits"], arguments["batch_invariant"]
        return reference.paged_attention(**arguments, compute_dtype=torch.float64)

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Fail unless a result is the right one in values, dtype and memory format.

        Raises:
            AssertionError: as :func:`tcport.testing.assert_close`.
        """
        expected_out, expected_lse = self.reference()
        dtype = self.recipe.query_dtype
        if (out.dtype, lse.dtype) != (dtype, torch.float32):
            raise AssertionError(f"dtypes are {out.dtype} and {lse.dtype}, expected {dtype} and torch.float32")
        if not out.is_contiguous():
            raise AssertionError(f"out has strides {out.stride()}, expected it contiguous")
        assert_close(out, expected_out, what="out")
        lse_dtype = torch.float32 if dtype == torch.float64 else dtype
        assert_close(lse, expected_lse, dtype=lse_dtype, what="lse")

    def to(self, device: torch.device | str) -> PagedBatch:
        """The same batch on another device, with the same strides and the same sharing of storage."""
        return PagedBatch(self.recipe, to_device(self.arguments, device))


def to_device(arguments: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Arguments with their tensors on another device.

    Strides stay, tensors that share a storage do so there, and one tensor under two names is one there too.
    """
    moved: dict[int, Tensor] = {}
    storages: dict[tuple[int, torch.dtype], Tensor] = {}  # the dtype, because all empty storages lie at address 0

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device == torch.device(device):
            return value
        if id(value) not in moved:
            moved[id(value)] = move_tensor(value)
        return moved[id(value)]

    def move_tensor(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        key = (storage.data_ptr(), value.dtype)
        if key not in storages:
            size = storage.nbytes() // value.element_size()
            storages[key] = value.as_strided((size,), (1,), 0).to(device)
        return storages[key].as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: move(value) for name, value in arguments.items()}


def build_batch(recipe: Recipe) -> PagedBatch:
    """The batch of a recipe, on the CPU.

    Every element of the caches and their scales that no token can see is ``recipe.poison``: page tails, pages of no
    sequence, positions behind a window, memory behind each head and around the caches. So are query tokens of no
    sequence and the memory between strided query tokens. Table entries without a page name pages that do not exist.
    """
    random = torch.Generator().manual_seed(recipe.seed)
    table, num_pages = _block_table(recipe, random)
    live = torch.zeros(num_pages, recipe.page, dtype=torch.bool)
    for sequence in range(len(recipe.lens)):
        positions = torch.tensor(recipe.live_positions(sequence), dtype=torch.int64)
        live[table[sequence, positions // recipe.page], positions % recipe.page] = True

    k_cache, v_cache = _caches(recipe, num_pages)
    v_cache[live] = _cache_values(recipe, live, recipe.dims[1], random)
    k_cache[live] = _cache_values(recipe, live, recipe.dims[0], random)
    seen = {
        (sequence, position // recipe.page)
        for sequence in range(len(recipe.lens))
        for position in recipe.live_positions(sequence)
    }
    for sequence in range(table.shape[0]):
        for column in range(table.shape[1]):
            if (sequence, column) not in seen:
                table[sequence, column] = _STRAY_PAGES[(sequence + column) % len(_STRAY_PAGES)]

    num_q_heads = recipe.heads[0]
    bounds = torch.tensor(recipe.query_bounds, dtype=recipe.index_dtype)
    return PagedBatch(
        recipe,
        {
            "query": _query(recipe, random),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": table.to(recipe.index_dtype),
            "seq_lens": torch.tensor(recipe.lens, dtype=recipe.index_dtype),
            "cu_seqlens_q": None if recipe.q_lens is None else bounds,
            "scale": recipe.scale,
            "causal": recipe.causal,
            "window": recipe.window,
            "softcap": recipe.softcap,
            "alibi_slopes": torch.rand(num_q_heads, generator=random) / 4 if recipe.alibi else None,
            "sinks": torch.randn(num_q_heads, generator=random) * 2 if recipe.sinks else None,
            "k_scale": _kv_scale(recipe, live, random),
            "v_scale": _kv_scale(recipe, live, random),
            "mask": _mask(recipe, random),
            "chunk": recipe.chunk,
            "num_splits": recipe.num_splits,
            "batch_invariant": recipe.batch_invariant,
        },
    )


def _block_table(recipe: Recipe, random: torch.Generator) -> tuple[Tensor, int]:
    """Page ids in random order, int64, and the number of pages: one more than needed."""
    counts = [math.ceil(length / recipe.page) for length in recipe.lens]
    table = torch.zeros(len(counts), max(counts, default=0) + recipe.spare_columns, dtype=torch.int64)
    order = iter(torch.randperm(sum(counts) + 1, generator=random).tolist())
    prefix = [next(order) for _ in range(min(recipe.shared_prefix, max(counts, default=0)))]
    for sequence, count in enumerate(counts):
        for column in range(count):
            # Only pages that are full in this sequence are shared; a last, partly filled page is its own.
            shared = column < len(prefix) and (column + 1) * recipe.page <= recipe.lens[sequence]
            table[sequence, column] = prefix[column] if shared else next(order)
    return table, sum(counts) + 1 + len(prefix)


def _caches(recipe: Recipe, pages: int) -> tuple[Tensor, Tensor]:
    page, num_heads, (k_dim, v_dim) = recipe.page, recipe.heads[1], recipe.dims
    if recipe.layout == "head_major":
        k, v = (_poisoned(recipe, pages, num_heads, page, dim + recipe.behind).transpose(1, 2) for dim in recipe.dims)
    elif recipe.layout == "interleaved":
        k, v = _poisoned(recipe, pages, 2, page, num_heads, max(recipe.dims) + recipe.behind).unbind(1)
    elif recipe.layout == "packed":
        both = _poisoned(recipe, pages, page, num_heads, k_dim + v_dim + recipe.behind)
        k, v = both[..., :k_dim], both[..., k_dim : k_dim + v_dim]
    elif recipe.layout == "pool":
        pool = _poisoned(recipe, 2, 2, pages, page, num_heads, max(recipe.dims) + recipe.behind)
        k, v = pool[1]
    elif recipe.layout == "mla":
        k = v = _poisoned(recipe, pages, page, num_heads, k_dim + recipe.behind)
    else:
        k, v = (_poisoned(recipe, pages, page, num_heads, dim + recipe.behind) for dim in recipe.dims)
    return k[..., :k_dim], v[..., :v_dim]


def _poisoned(recipe: Recipe, *shape: int) -> Tensor:
    """Poison of a shape, inside a storage that has poison before and after it."""
    size, before = math.prod(shape), recipe.storage_offset
    dtype = recipe.cache_dtype
    poison = 127.0 if dtype == torch.int8 else recipe.poison  # an int8 can be neither NaN nor infinite
    storage = torch.full((before + size + 16,), poison).to(dtype)
    return storage[before : before + size].view(shape)


def _cache_values(recipe: Recipe, live: Tensor, dim: int, random: torch.Generator) -> Tensor:
    values = torch.randn(int(live.sum()), recipe.heads[1], dim, generator=random)
    if recipe.cache_dtype == torch.int8:
        return (values * 32).round().clamp(-128, 127).to(torch.int8)
    return values.to(recipe.cache_dtype)


def _kv_scale(recipe: Recipe, live: Tensor, random: torch.Generator) -> Tensor | None:
    unit = 1 / 32 if recipe.cache_dtype == torch.int8 else 1.0
    shape = {"none": None, "scalar": (), "one": (1,), "head": recipe.heads[1:], "token": (*live.shape, recipe.heads[1])}
    if shape[recipe.kv_scales] is None:
        return None
    scale = unit * (0.5 + torch.rand(shape[recipe.kv_scales], generator=random))
    return torch.where(live[..., None], scale, recipe.poison) if recipe.kv_scales == "token" else scale


def _query(recipe: Recipe, random: torch.Generator) -> Tensor:
    num_tokens, num_heads, dim = recipe.num_tokens, recipe.heads[0], recipe.dims[0]
    width = num_heads * dim
    before, after = (3 * dim, 5 * dim) if recipe.strided_query else (0, 0)
    rows = torch.full((num_tokens, before + width + after), recipe.poison)
    first, last = recipe.query_bounds[0], recipe.query_bounds[-1]
    rows[first:last, before : before + width] = torch.randn(last - first, width, generator=random)
    return rows.to(recipe.query_dtype)[:, before : before + width].unflatten(1, (num_heads, dim))


def _mask(recipe: Recipe, random: torch.Generator) -> Tensor | None:
    """Two keys of three visible; every fifth token sees nothing."""
    if recipe.mask_columns is None:
        return None
    mask = torch.rand(recipe.num_tokens, recipe.mask_columns, generator=random) < 2 / 3
    mask[4::5] = False
    return mask
