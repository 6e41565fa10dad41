"""Follows a key or value back to the cache it was gathered from, through views, gathers, casts and dequantisation."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, Read
from tcport.adapter.names import op_name
from tcport.adapter.report import Rejected
from tcport.adapter.sizes import tensor_of

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref

_CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as", "_to_copy")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One element of K or V as an element of a cache.

    Attributes:
        ref: the element of the cache, its page index a :class:`~tcport.adapter.algebra.Read` of the block table.
        scale: the element of a tensor that it is multiplied by, or None.
        factor: the number that it is multiplied by.
        interior: the nodes that gather and convert it.
    """

    ref: Ref
    scale: Ref | None
    factor: float
    interior: frozenset[Node]


def stored(reader: Reader, ref: Ref, key: Expr, name: str) -> Stored:
    """Follow ``ref``, an element of K or V (``name`` says which) for the key at coordinate ``key``.

    Raises:
        Rejected: it does not come out of a cache through a table of pages, or is changed on the way.
    """
    found = _follow(reader, ref, name)
    coords = found.ref.coords
    if not any(coord.has(Read) for coord in coords) or not any(coord.has(key) for coord in coords):
        raise Rejected("not-paged", _what_it_is(reader, found.ref, name))
    return found


def _follow(reader: Reader, ref: Ref, name: str) -> Stored:
    path = reader.path(ref)
    end = path[-1]
    for outer, inner in itertools.pairwise(path):
        _check_cast(inner.node, outer.node, name)
    passed = frozenset(step.node for step in path)
    product = reader.apply({"mul": _factors, "multiply": _factors}, end)
    if product is not None:
        return _product(reader, product, passed, name)
    source = reader.apply(dict.fromkeys(_CASTS, _cast_source), end)
    if source is None:
        own = frozenset(node for node in passed if not aliasing.aliases(node, end.node))  # all but views of the cache
        return Stored(end, None, 1.0, own)
    inner = _follow(reader, source, name)
    _check_cast(inner.ref.node, end.node, name)
    return dataclasses.replace(inner, interior=inner.interior | passed)


def _product(reader: Reader, product: tuple[Any, Any], interior: frozenset[Node], name: str) -> Stored:
    """``stored * number``, or ``stored * scale`` in either order: the stored one is the quantised, or the larger."""
    numbers = [x for x in product if isinstance(x, int | float)]
    tensors = [x for x in product if not isinstance(x, int | float)]
    parts = [_follow(reader, x, name) for x in tensors]
    if numbers:
        part = parts[0]
        return dataclasses.replace(part, factor=part.factor * float(numbers[0]), interior=part.interior | interior)
    parts.sort(key=lambda p: len(p.ref.coords), reverse=True)
    cache, scale = parts
    if cache.scale is not None or scale.scale is not None or len(cache.ref.coords) == len(scale.ref.coords):
        raise Rejected("scale", f"{name} is multiplied by {scale.ref.node.name}, which is no scale of a cache")
    return dataclasses.replace(
        cache,
        scale=scale.ref,
        factor=cache.factor * scale.factor,
        interior=cache.interior | scale.interior | interior,
    )


def _factors(reader: Reader, ref: Ref, input: Any, other: Any) -> tuple[Any, Any] | None:
    sides: list[Any] = []
    for side in (input, other):
        if isinstance(side, Node) and tensor_of(side) is not None:
            sides.append(reader.broadcast(side, ref))
        elif isinstance(side, int | float):
            sides.append(side)
        else:
            return None
    return None if all(isinstance(side, int | float) for side in sides) else (sides[0], sides[1])


def _cast_source(reader: Reader, ref: Ref, input: Node, *_: Any, **__: Any) -> Ref | None:
    """The operand of a cast from int8, which is no data movement among floats."""
    tensor = tensor_of(input)
    return reader.ref(input, ref.coords, ref.time) if tensor is not None and tensor.dtype == torch.int8 else None


def _check_cast(inner: Node, outer: Node, name: str) -> None:
    source, target = tensor_of(inner), tensor_of(outer)
    if source is not None and target is not None and not keeps_value(source.dtype, target.dtype):
        raise Rejected(
            "dtype", f"{name} is rounded from {source.dtype} to {target.dtype} by {outer.name} before it is used"
        )


def unrounded(path: list[Ref]) -> list[Ref]:
    """The steps of a path, nearest first, that hold the same value: up to the first cast that rounds."""
    steps = path[:1]
    for outer, inner in itertools.pairwise(path):
        source, target = tensor_of(inner.node), tensor_of(outer.node)
        if source is None or target is None or not keeps_value(source.dtype, target.dtype):
            break
        steps.append(inner)
    return steps


def keeps_value(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` has an equal in ``target``."""
    if source == target:
        return True
    if not target.is_floating_point:
        return False
    wide = torch.finfo(target)
    if source == torch.int8:
        return wide.eps <= 2**-7 and wide.max >= 128
    if not source.is_floating_point:
        return False
    narrow = torch.finfo(source)
    return wide.eps <= narrow.eps and wide.max >= narrow.max and wide.tiny <= narrow.tiny


def _what_it_is(reader: Reader, ref: Ref, name: str) -> str:
    """Why an element is no row of a paged cache, in a sentence."""
    node = ref.node
    made = reader.definition(ref)
    last = reader.facts.last_mutation(node, ref.time)
    if made is None and last is not None and node.op not in ("placeholder", "get_attr"):
        return f"{name} is changed in place by {last[0].name} after {node.name} has made it"
    if made is None:
        return f"{name} is read from {node.name} without a block table"
    return f"{name} is made by {node.name} ({op_name(node) or node.target}), not gathered from a cache"
