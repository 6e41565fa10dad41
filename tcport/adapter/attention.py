"""From an attention computation, read element by element, to one call of the canonical operator.

The matchers say which query meets which key under which mask, in the coordinates of the result. Here those coordinates
get their roles: sequences, query tokens, KV heads, query heads of one KV head, value dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
from torch.fx import Node

from tcport.adapter.algebra import Expr, FloorDiv, Read, Space, divided
from tcport.adapter.booleans import Formula, substituted
from tcport.adapter.digits import digits_of
from tcport.adapter.graph import GraphFacts
from tcport.adapter.lengths import fitting
from tcport.adapter.masks import Visibility, symbols_in, visibility
from tcport.adapter.reader import Reader, Ref
from tcport.adapter.report import Rejected
from tcport.adapter.sizes import shape_of
from tcport.adapter.stored import Stored, stored

MAX_GROUP = 64
"""A query dimension that no mask tells apart counts as heads of one KV head up to this size, and as tokens above."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """``out[coords] = sum over j of softmax over j (scale * sum over d of query * key, capped, masked) * value``.

    Attributes:
        anchor: the node that computes the result.
        coords: coordinates of the result, one per dimension of ``anchor``.
        query, key, value: elements of Q (at ``coords`` and ``dims``), K (likewise, and at ``position``) and V.
        position: coordinate of the key among ``keys`` gathered ones.
        dims: coordinate of the dimension summed over in q.k.
        scale: factor of the logits; None for the operator's default.
        softcap: as the operator takes it.
        visible: which keys a token sees.
        token: the coordinate known to count query tokens, if any.
        slopes, sinks: elements of ALiBi slopes and sink logits, per query head.
        product: the node that computes q.k; ``anchor`` when that does it all.
        interior: the nodes that hold logits and weights.
    """

    anchor: Node
    coords: tuple[Expr, ...]
    query: Ref
    key: Ref
    value: Ref
    position: Expr
    keys: Expr
    dims: Expr
    scale: float | None
    softcap: float
    visible: Formula
    product: Node
    token: Expr | None = None
    slopes: Ref | None = None
    sinks: Ref | None = None
    interior: frozenset[Node] = frozenset()


@dataclasses.dataclass(frozen=True)
class Roles:
    """An :class:`Attention` with its coordinates split and named; what :mod:`tcport.adapter.call` builds from.

    Attributes:
        attention: the computation, with ``coords`` in terms of the coordinates below.
        key, value: the cached elements, at coordinates affine in ``page``, ``slot``, ``head`` and a head dim.
        table: the element of the block table, at ``sequences`` and ``column``.
        sequences, head, group, token: coordinates of sequences (any number), KV head, query heads per KV head, query
            token; 0 where there is one.
        page, column, slot: page id, column of the table, position in a page.
        value_dim: coordinate of V's head dim.
        visible: as the operator's arguments.
    """

    attention: Attention
    key: Stored
    value: Stored
    table: Expr
    sequences: tuple[Expr, ...]
    head: tuple[Expr, ...]
    group: tuple[Expr, ...]
    token: tuple[Expr, ...]
    page: Expr
    column: Expr
    slot: Expr
    value_dim: tuple[Expr, ...]
    visible: Visibility
    tokens: Expr
    forms: tuple[tuple[Ref, Expr], ...] = dataclasses.field(repr=False)


def understand(facts: GraphFacts, describe: Callable[[Reader], Attention | None]) -> tuple[Reader, Roles] | None:
    """Read an attention and find its roles, with the sizes that a kernel is compiled for fixed to their values.

    Args:
        facts: the graph.
        describe: reads the attention; None when there is none.

    Raises:
        Rejected: the computation is no attention over a paged cache, or not one that the operator has.
    """
    while True:
        reader = Reader(facts, Space())
        attention = describe(reader)
        if attention is None:
            return None
        try:
            roles = _roles_of(reader, attention)
        except _Symbolic as symbolic:
            for size in symbolic.sizes:
                if not facts.fix(size):
                    raise Rejected("sizes", f"size {size} is unknown while compiling, and kernels need it") from None
            continue
        for size, reason in roles.visible.needs:
            if not facts.holds(size):
                raise Rejected("sizes", reason)
        return reader, roles


class _Symbolic(Exception):
    """Sizes that a kernel is compiled for are symbols in this graph."""

    def __init__(self, sizes: list[Expr]) -> None:
        super().__init__(sizes)
        self.sizes = sizes


def _roles_of(reader: Reader, attention: Attention) -> Roles:
    """Find the cache, the table and the role of every coordinate."""
    space = reader.space
    key = stored(reader, attention.key, attention.position, "K")
    value = stored(reader, attention.value, attention.position, "V")
    divisions = {part for c in (*key.ref.coords, *value.ref.coords) for part in c.atoms(FloorDiv)}
    if symbolic := [part.args[1] for part in divisions if part.args[1].free_symbols]:
        raise _Symbolic(symbolic)
    split: dict[Expr, Expr] = {}
    while (more := _next_split(space, attention, key, value)) is not None:
        attention, key, value = (_moved(space, x, more) for x in (attention, key, value))
        split = {old: space.substitute(new, more) for old, new in split.items()} | more

    table = _table_read(key, attention.position, "K")
    if (other := _table_read(value, attention.position, "V")) != table:
        raise Rejected("tables-differ", f"K lies in page {_said(reader, table)} and V in page {_said(reader, other)}")
    page_size = _page_size(table, attention.position, attention.keys)
    fits = fitting(reader, key, table, attention.position, attention.keys, page_size)
    page = space.symbol("page", sympy.Symbol("pages", integer=True, positive=True))
    column = space.symbol("column", _ceildiv(attention.keys, page_size))
    slot = space.symbol("slot", page_size)
    paged = {attention.position: page_size * column + slot}
    table_at = space.substitute(table, paged)

    first = _first_page(key, table)
    key, value = (_moved(space, _moved(space, x, {table: page - first}), paged) for x in (key, value))
    if column in space.symbols_of(*key.ref.coords, *value.ref.coords):
        raise Rejected("layout", "the keys of a sequence do not follow each other page by page")

    for element in (key, value):
        for coord, size in zip(element.ref.coords, shape_of(element.ref.node), strict=True):
            if size.free_symbols and digits_of(space, coord, size, {page}) is None:
                raise _Symbolic([size])  # a flattened cache whose slots are no known multiple of the page size
    outer = [s for c in attention.coords for s in space.in_order(c)]
    sequences = [s for s in outer if table_at.has(s)]
    heads = [s for s in outer if _has(key, s) and s not in sequences]
    value_dim = [s for s in outer if _has(value, s) and s not in sequences and s not in heads]
    if len(heads) > 1 or len(value_dim) > 1 or any(_has(element, s) for element in (key, value) for s in sequences):
        raise Rejected("layout", f"K is read at ({', '.join(map(str, key.ref.coords))})")
    if any(ref.has(s) for s in value_dim for ref in (*attention.query.coords, *symbols_in(space, attention.visible))):
        raise Rejected("layout", "the dimension of V also indexes Q or the mask")
    left = [s for s in outer if s not in (*sequences, *heads, *value_dim)]
    group, tokens = _query_dims(space, attention, left)
    sequences += tokens[:-1]
    token = tokens[-1:]

    told_apart = symbols_in(space, attention.visible) & {*heads, *group}
    if told_apart:
        raise Rejected("mask", "the mask differs between heads")
    names = (*heads, *group, *value_dim, attention.dims, slot)
    if symbolic := [space.sizes[name] for name in names if name != 0 and space.sizes[name].free_symbols]:
        raise _Symbolic(symbolic)
    count = space.size_of(token)
    visible = visibility(
        space,
        attention.visible,
        attention.position,
        attention.keys,
        token[0] if token else sympy.Integer(0),
        count,
        fits,
    )
    return Roles(
        attention=attention,
        key=key,
        value=value,
        table=table_at + first,
        sequences=tuple(sequences),
        head=tuple(heads),
        group=tuple(group),
        token=tuple(token),
        page=page,
        column=column,
        slot=slot,
        value_dim=tuple(value_dim),
        visible=visible,
        tokens=count,
        forms=tuple(
            (_moved(space, ref, mapping), space.substitute(expr, mapping))
            for mapping in (split, split | paged)
            for ref, expr in reader.forms
        ),
    )


def _next_split(space: Space, attention: Attention, key: Stored, value: Stored) -> dict[Expr, Expr] | None:
    """A coordinate of the result that K, V or Q use in two parts, such as a query head as KV head and rest."""
    outer = space.symbols_of(*attention.coords)
    for expr in (*key.ref.coords, *value.ref.coords, *attention.query.coords):
        for part in expr.atoms(FloorDiv):
            whole, size = part.args
            if whole not in outer:
                continue
            high = divided(space.sizes[whole], size)
            if high is None and space.sizes[whole].free_symbols:
                raise _Symbolic([space.sizes[whole]])
            if high is None:
                raise Rejected("sizes", f"a dimension of size {space.sizes[whole]} is used in parts of {size}")
            return {whole: size * space.symbol("high", high) + space.symbol("low", size)}
    return None


def _moved(space: Space, thing: Any, mapping: dict[Expr, Expr]) -> Any:
    """The same thing at other coordinates."""
    if isinstance(thing, Ref):
        return dataclasses.replace(thing, coords=tuple(space.substitute(c, mapping) for c in thing.coords))
    if isinstance(thing, Stored):
        scale = None if thing.scale is None else _moved(space, thing.scale, mapping)
        return dataclasses.replace(thing, ref=_moved(space, thing.ref, mapping), scale=scale)
    if isinstance(thing, Attention):
        refs = ("query", "key", "value", "slopes", "sinks")
        moved = {n: _moved(space, getattr(thing, n), mapping) for n in refs if getattr(thing, n) is not None}
        return dataclasses.replace(
            thing,
            coords=tuple(space.substitute(c, mapping) for c in thing.coords),
            visible=substituted(space, thing.visible, mapping),
            **moved,
        )
    raise TypeError(f"nothing to move in {type(thing).__name__}")


def _table_read(element: Stored, position: Expr, name: str) -> Read:
    """The one read that says in which page an element lies."""
    reads = {read for coord in element.ref.coords for read in coord.atoms(Read)}
    outermost = {read for read in reads if not any(read != other and other.has(read) for other in reads)}
    paging = [read for read in outermost if read.has(position)] or list(outermost)
    if len(paging) != 1:
        raise Rejected("not-paged", f"{name} is gathered by {len(paging)} index tensors, not by one table of pages")
    return paging[0]


def _first_page(element: Stored, table: Read) -> Expr:
    """The page of entry 0, which is added to the entries: -1 where ids count from 1, as in ``cache[table - 1]``.

    Ids that count from below 0 read a cache from some page on, which is a view of it. A larger step back, such as by
    the number of pages, may be meant to lead below 0, where PyTorch counts from the end.
    """
    return sympy.Integer(-1) if any(coord - table == -1 for coord in element.ref.coords) else sympy.Integer(0)


def _page_size(table: Read, position: Expr, keys: Expr) -> Expr:
    """How many consecutive positions one entry of the table covers, from the coordinate at which it is read."""
    column = [coord for coord in table.coords if coord.has(position)]
    if not column:
        return keys  # one page per sequence holds them all
    if column == [position]:
        return sympy.Integer(1)
    if len(column) == 1 and isinstance(column[0], FloorDiv) and column[0].args[0] == position:
        return column[0].args[1]
    raise Rejected("layout", f"column {column[0]} of the table is no position divided by a page size")


def _query_dims(space: Space, attention: Attention, left: list[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Divide the coordinates that only Q has: query heads that share a KV head, and query tokens."""
    told_apart = symbols_in(space, attention.visible)

    def is_token(symbol: Expr) -> bool:
        size = space.sizes[symbol]
        large = not size.is_Integer or size > MAX_GROUP
        return symbol in told_apart or (large and attention.token in (None, symbol))

    tokens = [symbol for symbol in left if is_token(symbol)]
    return [symbol for symbol in left if symbol not in tokens], tokens


def _has(element: Stored, symbol: Expr) -> bool:
    return any(coord.has(symbol) for coord in element.ref.coords)


def _ceildiv(a: Expr, b: Expr) -> Expr:
    exact = divided(a, b)
    if exact is not None:
        return exact
    return -(-a // b) if a.is_Integer and b.is_Integer else sympy.ceiling(a / b)


def _said(reader: Reader, table: Read) -> str:
    node = reader.facts.node_of(table.args[0])
    return f"{node.name}[{', '.join(map(str, table.coords))}]"
