"""Builds the call of ``tcport::paged_attention`` that an attention with known roles comes down to."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch.fx import Node

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, equal
from tcport.adapter.attention import Roles
from tcport.adapter.booleans import TRUE
from tcport.adapter.emit import Emitter, Groups
from tcport.adapter.names import op_name
from tcport.adapter.reader import Reader, Ref
from tcport.adapter.report import Match, Rejected
from tcport.adapter.sizes import shape_of, tensor_of
from tcport.adapter.stored import Stored, keeps_value, unrounded
from tcport.adapter.views import VIEWS

_PASSED_ON = {"float", "to", "half", "bfloat16", "double", "type", "type_as", "cuda"}
"""Names in VIEWS whose result may have another dtype."""


def match_of(reader: Reader, roles: Roles, matcher: str) -> Match:
    """Check what does not depend on building, and promise to build the rest.

    Args:
        reader: what the attention was read with.
        roles: the attention.
        matcher: name of the matcher.

    Raises:
        Rejected: dtypes or gradients that the operator cannot reproduce.
    """
    anchor = roles.attention.anchor
    out = _tensor(anchor)
    if out.requires_grad:
        raise Rejected("gradient", f"a gradient is recorded through {anchor.name}; run under torch.inference_mode()")
    cache, query = _dtypes(reader, roles)
    interior = roles.attention.interior | roles.key.interior | roles.value.interior
    notes = []
    if roles.visible.rest != TRUE:
        notes.append("part of the mask is passed on as a bool tensor")
    if roles.visible.capped and roles.visible.lengths == (roles.attention.keys,) and roles.visible.longest is None:
        notes.append("every gathered key counts as written: there is no length")

    def build(emit: Emitter) -> Node:
        emit.use(reader.space, list(roles.forms), out.device)
        return _build(emit, reader, roles, cache, query)

    return Match("paged_attention", anchor, build, interior - {anchor}, notes=tuple(notes), matcher=matcher)


def _build(emit: Emitter, reader: Reader, roles: Roles, cache_dtype: torch.dtype, query_dtype: torch.dtype) -> Node:
    attention, visible = roles.attention, roles.visible
    tokens = [*roles.sequences, *roles.token]
    heads = [*roles.head, *roles.group]
    whole = {roles.page} if roles.column != 0 else {roles.page, roles.slot}
    query = _query(emit, reader, attention.query, [tokens, heads, _list(attention.dims)], query_dtype)
    k_cache = _cache(
        emit, reader, roles.key, [_list(roles.page), _list(roles.slot), [*roles.head], _list(attention.dims)], whole
    )
    v_cache = _cache(
        emit, reader, roles.value, [_list(roles.page), _list(roles.slot), [*roles.head], [*roles.value_dim]], whole
    )
    _same_pages(k_cache, v_cache)
    table = _table(emit, roles, k_cache)
    optional: dict[str, Any] = {
        "k_scale": _kv_scale(emit, roles, roles.key, 1.0, cache_dtype),
        "v_scale": _kv_scale(emit, roles, roles.value, roles.value.factor, cache_dtype),
        "window": visible.window,
        "chunk": visible.chunk,
        "alibi_slopes": None if attention.slopes is None else _per_head(emit, attention.slopes, heads),
        "sinks": None if attention.sinks is None else _per_head(emit, attention.sinks, heads),
        "mask": None if visible.rest == TRUE else emit.boolean(visible.rest, [tokens, [attention.position]]),
    }
    scale = attention.scale
    if scale is None and roles.key.factor != 1:
        scale = float(emit.space.size_of(_list(attention.dims))) ** -0.5
    optional["scale"] = None if scale is None else scale * roles.key.factor
    if not visible.causal:
        optional["causal"] = False
    if attention.softcap:
        optional["softcap"] = attention.softcap
    cu_seqlens = _cu_seqlens(emit, roles)
    both = emit.call(
        torch.ops.tcport.paged_attention.default,
        *(query, k_cache, v_cache, table, _seq_lens(emit, roles)),
        *(() if cu_seqlens is None else (cu_seqlens,)),
        **{name: value for name, value in optional.items() if value is not None},
    )
    out = emit.call(operator.getitem, both, 0)
    result = _in_shape(emit, out, roles, tokens, heads)
    dtype = _tensor(attention.anchor).dtype
    return result if dtype == query_dtype else emit.call("to", result, dtype)


def _same_pages(k_cache: Node, v_cache: Node) -> None:
    """Refuse caches that are known to differ in pages or page size, as where ids count from another page in each."""
    for name, k_size, v_size in zip(("pages", "slots"), shape_of(k_cache)[:2], shape_of(v_cache)[:2], strict=True):
        difference = k_size - v_size
        if difference.is_Integer and difference != 0:
            raise Rejected("layout", f"K is read from {k_size} {name} and V from {v_size}")


def _query(emit: Emitter, reader: Reader, ref: Ref, groups: Groups, dtype: torch.dtype) -> Node:
    """Q packed as [tokens, heads, dim], taken from as early in the graph as its value is still the same."""
    candidates = unrounded(reader.path(ref))
    usable = [c for c in candidates if _tensor(c.node).dtype == dtype] or candidates[:1]
    for candidate in reversed(usable):
        if emit.fresh(candidate):
            with contextlib.suppress(Rejected):
                node = emit.view(candidate, groups)
                return node if _tensor(node).dtype == dtype else emit.call("to", node, dtype)
    raise Rejected("layout", f"Q, read from {ref.node.name}, cannot be packed as [tokens, heads, dim]")


def _cache(emit: Emitter, reader: Reader, element: Stored, groups: Groups, whole: set[Expr]) -> Node:
    ref = element.ref
    cache = emit.view(ref, groups, whole=whole)
    if not aliasing.aliases(cache, ref.node):
        raise Rejected("layout", f"{ref.node.name} would have to be copied to be viewed as [pages, page, heads, dim]")
    for mutator, changed in emit.facts.mutations(ref.node, ref.time, emit.time):
        if not aliasing.disjoint(aliasing.reach(changed, mutator), _tensor(cache)):
            raise Rejected(
                "written",
                f"{ref.node.name} is written by {mutator.name} between the gather and its use by {emit.before.name}",
            )
    return cache


def _table(emit: Emitter, roles: Roles, k_cache: Node) -> Node:
    """The block table. Where positions below a length may be hidden, PyTorch's meaning of a negative entry is kept.

    Pages behind a window or under a mask are padding to some models; the operator takes every entry below the length
    for a page id, and indexing in PyTorch takes negative ones from the end of the cache.
    """
    table = emit.integer(roles.table, [roles.sequences, _list(roles.column)], whole={roles.column})
    visible = roles.visible
    if visible.rest == TRUE and visible.window is None and visible.chunk is None:
        return table
    return emit.call(operator.mod, table, emit.size(shape_of(k_cache)[0]))


def _seq_lens(emit: Emitter, roles: Roles) -> Node:
    visible, keys, sequences = roles.visible, roles.attention.keys, [*roles.sequences]
    if visible.longest is not None:
        lengths = emit.call("amax", emit.integer(visible.longest, [sequences, roles.token]), -1)
    else:
        first, *rest = (emit.integer(length, [sequences]) for length in visible.lengths)
        lengths = first
        for other in rest:
            lengths = emit.call(torch.minimum, lengths, other)
    if visible.capped and (
        visible.longest is not None or not all(emit.space.at_least(keys, u) for u in visible.lengths)
    ):
        lengths = emit.call("clamp", lengths, max=emit.size(keys))
    if _tensor(lengths).dtype not in (torch.int32, torch.int64):
        lengths = emit.call("to", lengths, torch.int64)
    return lengths


def _cu_seqlens(emit: Emitter, roles: Roles) -> Node | None:
    if not roles.token:
        return None
    count = emit.size(emit.space.size_of(roles.sequences) + 1)
    starts = emit.call(torch.arange, count, dtype=torch.int32, device=emit.device)
    return emit.call(operator.mul, starts, emit.size(roles.tokens))


def _kv_scale(emit: Emitter, roles: Roles, element: Stored, factor: float, cache_dtype: torch.dtype) -> Node | None:
    node = None
    if element.scale is not None:
        symbols = emit.space.symbols_of(*element.scale.coords)
        head = [*roles.head]
        groups: Groups = [[*head]] if symbols & {*head} else []
        if roles.page in symbols:
            groups = [_list(roles.page), _list(roles.slot), head]
        if not emit.fresh(element.scale):
            raise Rejected("written", f"{element.scale.node.name} changes between its use and {emit.before.name}")
        node = emit.view(element.scale, groups, whole={roles.page})
    elif cache_dtype == torch.int8 or factor != 1:
        node = emit.call(torch.ones, (), dtype=torch.float32, device=emit.device)
    return node if node is None or factor == 1 else emit.call(operator.mul, node, factor)


def _per_head(emit: Emitter, ref: Ref, heads: list[Expr]) -> Node:
    if not emit.fresh(ref):
        raise Rejected("written", f"{ref.node.name} changes between its use and {emit.before.name}")
    return emit.view(ref, [heads])


def _in_shape(emit: Emitter, out: Node, roles: Roles, tokens: list[Expr], heads: list[Expr]) -> Node:
    """The packed result in the shape of the anchor."""
    space, anchor = emit.space, roles.attention.anchor
    wanted = [s for coord in roles.attention.coords for s in space.in_order(coord)]
    units: list[list[Expr]] = []
    for group in (tokens, heads, [*roles.value_dim]):
        for symbol in group:
            at = wanted.index(symbol)
            together = symbol is not group[0] and at > 0 and wanted[at - 1] == units[-1][-1]
            if together:
                units[-1].append(symbol)
            else:
                units.append([symbol])
    order = sorted(range(len(units)), key=lambda i: wanted.index(units[i][0]))
    shape = [emit.size(size) for size in shape_of(anchor)]
    if order == sorted(order):
        return emit.call("reshape", out, *shape)
    spread = emit.call("reshape", out, *(emit.size(space.size_of(unit)) for unit in units))
    turned = emit.call("permute", spread, *order)
    if all(equal(have, want) for have, want in zip_longest(shape_of(turned), shape_of(anchor), fillvalue=-1)):
        return turned
    return emit.call("reshape", turned, *shape)


def _dtypes(reader: Reader, roles: Roles) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the cache and of the query the operator gets; its result has the query's.

    Raises:
        Rejected: some value would be rounded otherwise than in the graph.
    """
    attention = roles.attention
    cache, out = _tensor(roles.key.ref.node).dtype, _tensor(attention.anchor).dtype
    logits = _tensor(attention.product).dtype  # under autocast this is not the dtype of Q and K
    if _tensor(roles.value.ref.node).dtype != cache:
        raise Rejected("dtype", "the K cache and the V cache have different dtypes")
    for name, ref, result in (("K", attention.key, logits), ("V", attention.value, out)):
        used = _tensor(ref.node).dtype
        if not keeps_value(used, result):
            raise Rejected("dtype", f"{name} is rounded from {used} to {result} (autocast?) before it is used")
    path = [_tensor(step.node).dtype for step in unrounded(reader.path(attention.query))]
    for node in attention.interior:
        if not keeps_value(out if cache.itemsize == 1 else cache, _tensor(node).dtype):
            raise Rejected("dtype", f"{node.name} rounds logits or weights to {_tensor(node).dtype}")
    if cache.itemsize == 1:
        return cache, out
    if not (any(keeps_value(dtype, cache) for dtype in path) or logits == cache):
        raise Rejected("dtype", f"Q has dtype {path[0]} and the cache {cache}: the operator would round Q")
    if out != cache and not all(dtype == cache for dtype in _dtypes_after(attention.anchor)):
        raise Rejected("dtype", f"the result is used as {out}, and the operator would round it to {cache}")
    return cache, cache


def _dtypes_after(node: Node) -> Iterator[torch.dtype | None]:
    """The dtypes in which a result is used, once views and copies are looked through; None for a use as it is."""
    for user in node.users:
        name = op_name(user)
        tensor = tensor_of(user)
        if tensor is None or name not in VIEWS or user.args[:1] != (node,):
            yield None
        elif name in _PASSED_ON and tensor.dtype != _tensor(node).dtype:
            yield tensor.dtype
        else:
            yield from _dtypes_after(user)


def _list(coord: Expr) -> list[Expr]:
    """A coordinate as a group: empty where it is fixed."""
    return [] if coord == 0 else [coord]


def _tensor(node: Node) -> torch.Tensor:
    tensor = tensor_of(node)
    if tensor is None:
        raise Rejected("layout", f"{node.name} has no example value, so nothing is known about it")
    return tensor
