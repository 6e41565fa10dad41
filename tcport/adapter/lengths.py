"""Whether the end of what a token sees is sure to lie within the gathered keys.

A mask is cut at the last gathered key, so its bound may lie anywhere past it. The operator's positions count from the
length, and a length past the table leads outside of it: only an end that stays within the keys can be a length from
which causality, a window or a chunk is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import sympy

from tcport.adapter.algebra import Expr, Read, equal
from tcport.adapter.gather import GATHERS
from tcport.adapter.names import op_name
from tcport.adapter.reader import Reader, Ref, is_integral
from tcport.adapter.sizes import shape_of

if TYPE_CHECKING:
    from tcport.adapter.stored import Stored

Fits = Callable[[Expr], bool]
"""Whether an end is certain to be at most the number of gathered keys."""


def fitting(reader: Reader, element: Stored, table: Read, position: Expr, keys: Expr, page_size: Expr) -> Fits:
    """What :func:`~tcport.adapter.masks.visibility` asks about the ends it finds.

    An integer input of the graph, less something or as it is, counts keys that lie in the table: that is what a length
    is. So does the end of a token whose own page the graph looks up in the table, to write its key there. They fit when
    every key of the table is gathered.

    Args:
        reader: what the attention was read with.
        element: K, read at ``position``. table: the read of its page.
        keys: the gathered positions. page_size: positions per entry of the table.
    """
    all_gathered = equal(_room(reader, element, table, position, page_size), keys)
    looked_up = set(_columns_of_last_tokens(reader, table, position)) if all_gathered else set()

    def fits(end: Expr) -> bool:
        if reader.space.at_least(keys, end):
            return True
        if all_gathered and reader.space.floordiv(end - 1, page_size) in looked_up:
            return True
        reads = [read for read in end.atoms(Read) if equal(end.coeff(read), 1)]
        rest = sympy.expand(end - sum(reads))
        if len(reads) != 1 or rest.has(Read) or not reader.space.at_least(sympy.Integer(0), rest):
            return False
        source = reader.facts.node_of(reads[0].args[0])
        if reader.facts.version(source, reader.facts.position[source]) != reads[0].args[1]:
            return False  # changed in place since it was given or computed
        if source.op in ("placeholder", "get_attr"):
            return all_gathered
        return bool(reader.apply(_CAPPED, Ref(source, reads[0].coords, reader.facts.position[source]), fits))

    return fits


def _room(reader: Reader, element: Stored, table: Read, position: Expr, page_size: Expr) -> Expr:
    """How many keys a row of the table has room for; 0 when that is not known."""
    columns = list(zip(table.coords, shape_of(reader.facts.node_of(table.args[0])), strict=True))
    for coord, size in columns:
        if coord.has(position):
            return page_size * size
    if any(size != 1 and not reader.space.symbols_of(coord) for coord, size in columns):
        return sympy.Integer(0)  # the first of several pages
    slots = zip(element.ref.coords, shape_of(element.ref.node), strict=True)
    return next((size for coord, size in slots if coord == position), sympy.Integer(0))


def _columns_of_last_tokens(reader: Reader, table: Read, position: Expr) -> Iterator[Expr]:
    """Columns at which the graph reads single entries of the table, for the last token of each sequence.

    PyTorch raises where a column is past the table, so a position with such a page has room in it.
    """
    apart = Reader(reader.facts, reader.space)
    row, column = ([c for c in table.coords if c.has(position) == there] for there in (False, True))
    if len(row) != 1 or len(column) != 1:
        return
    for node in reader.facts.nodes:
        if op_name(node) not in GATHERS or not is_integral(node) or not (shape := shape_of(node)):
            continue
        if not equal(shape[0], reader.space.size_of(reader.space.symbols_of(row[0]))):
            continue
        at = Ref(node, (row[0], *(size - 1 for size in shape[1:])), reader.facts.position[node])
        for step in apart.path(at):
            entry = apart.read(step)
            if entry.args[:2] == table.args[:2] and row[0] in entry.coords:
                yield from (coord for coord in entry.coords if coord != row[0])


def _fits(reader: Reader, ref: Ref, fits: Fits, value: Any) -> bool:
    known = reader.operand(value, ref)
    return known is not None and fits(known)


def _clamp(reader: Reader, ref: Ref, fits: Fits, input: Any, min: Any = None, max: Any = None) -> bool:
    if max is not None and _fits(reader, ref, fits, max):
        return True
    return _fits(reader, ref, fits, input) and (min is None or _fits(reader, ref, fits, min))


def _minimum(reader: Reader, ref: Ref, fits: Fits, input: Any, other: Any) -> bool:
    return _fits(reader, ref, fits, input) or _fits(reader, ref, fits, other)


def _maximum(reader: Reader, ref: Ref, fits: Fits, input: Any, other: Any) -> bool:
    return _fits(reader, ref, fits, input) and _fits(reader, ref, fits, other)


_CAPPED: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_max": lambda reader, ref, fits, input, max: _clamp(reader, ref, fits, input, max=max),
    "clamp_min": lambda reader, ref, fits, input, min: _clamp(reader, ref, fits, input, min=min),
    **dict.fromkeys(("minimum", "min"), _minimum),
    **dict.fromkeys(("maximum", "max"), _maximum),
}
