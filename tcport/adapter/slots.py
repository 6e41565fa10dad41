"""A write of whole tokens into slots of one cache: which coordinates are tokens, which are heads and head dims."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import sympy
import torch
from torch.fx import Node

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, FloorDiv, Read, divided
from tcport.adapter.graph import GraphFacts
from tcport.adapter.reader import Reader, Ref
from tcport.adapter.report import Rejected
from tcport.adapter.sizes import shape_of, tensor_of
from tcport.adapter.targets import Target, is_full, target_of


@dataclasses.dataclass(frozen=True)
class SlotWrite:
    """Tokens written into slots.

    Attributes:
        target: the write, element by element.
        cache: the cache at coordinates affine in ``page``, ``place`` (within a page), ``head`` and ``dim``.
        slots: the slot of a token, in the coordinates ``tokens``.
        tokens: coordinates of the tokens, in the order in which the value lists them.
        head, dim: coordinates of the KV head and of its elements; empty where there is one.
    """

    target: Target
    cache: Ref
    slots: Expr
    tokens: tuple[Expr, ...]
    head: tuple[Expr, ...]
    dim: tuple[Expr, ...]
    page: Expr
    place: Expr

    @property
    def node(self) -> Node:
        """The node that writes."""
        return self.target.node

    @property
    def region(self) -> torch.Tensor:
        """What the write can reach."""
        return aliasing.reach(self.target.changed, self.node)

    def where(self, reader: Reader) -> tuple[Expr, ...]:
        """Slots and number of tokens, comparable between writes."""
        names = {s: sympy.Symbol(f"token{i}", integer=True, nonnegative=True) for i, s in enumerate(self.tokens)}
        return (self.slots.xreplace(names), *(reader.space.sizes[s] for s in self.tokens))


def slot_write(reader: Reader, node: Node) -> SlotWrite | None:
    """Read a node as a write into slots; None when it is no indexed write of a float tensor.

    Raises:
        Rejected: it is one, but not of whole tokens into slots.
    """
    target = target_of(reader, node)
    if target is None:
        return None
    target = _split(reader, target)
    space, root, coords = reader.space, target.cache.node, target.cache.coords
    indexed = [d for d, c in enumerate(coords) if c.has(Read)]
    partial = [d for d, c in enumerate(coords) if not is_full(root, d, c, space.sizes)]
    counting = indexed or [d for d in partial if space.symbols_of(coords[d])][:1]
    if not counting:
        return None
    tokens = [s for s in target.coords if s != 0 and any(coords[d].has(s) for d in counting)]
    slotted = [d for d, c in enumerate(coords) if d in counting or any(c.has(s) for s in tokens)]
    features = [s for d, c in enumerate(coords) if d not in slotted for s in target.coords if s != 0 and c.has(s)]
    if len(slotted) > 2 or not 1 <= len(features) <= 2 or {*tokens, *features} != {s for s in target.coords if s != 0}:
        raise Rejected(
            "slots", f"{node.name} writes {root.name} at ({', '.join(map(str, coords))}): no [heads, dim] at a slot"
        )

    page = space.symbol("page", sympy.Symbol("pages", integer=True, positive=True))
    moved = list(coords)
    sizes = shape_of(root)
    if len(slotted) == 2:
        place = space.symbol("place", sizes[slotted[1]])
        slots = sympy.expand(coords[slotted[0]] * sizes[slotted[1]] + coords[slotted[1]])
        moved[slotted[0]], moved[slotted[1]] = page, place
    else:
        page_size = _page_size(reader.facts, root, sizes[slotted[0]])
        place = space.symbol("place", page_size)
        slots = coords[slotted[0]]
        moved[slotted[0]] = page_size * page + place
    cache = dataclasses.replace(target.cache, coords=tuple(moved))
    return SlotWrite(target, cache, slots, tuple(tokens), tuple(features[:-1]), tuple(features[-1:]), page, place)


def _split(reader: Reader, target: Target) -> Target:
    """Name apart what the cache has apart: a row of heads x head dim becomes a head and a place in it."""
    space = reader.space
    for coord in target.cache.coords:
        for part in coord.atoms(FloorDiv):
            whole, size = part.args
            high = divided(space.sizes[whole], size) if whole in target.coords else None
            if high is None:
                continue
            apart = {whole: size * space.symbol("high", high) + space.symbol("low", size)}
            moved = [
                dataclasses.replace(ref, coords=tuple(space.substitute(c, apart) for c in ref.coords))
                for ref in (target.cache, target.value)
            ]
            symbols = [s for c in target.coords for s in space.in_order(space.substitute(c, apart))]
            return _split(reader, dataclasses.replace(target, cache=moved[0], value=moved[1], coords=tuple(symbols)))
    return target


def attentions(facts: GraphFacts) -> Iterator[tuple[Node, tuple[Node, Node]]]:
    """Every canonical attention in the graph, with its K and V cache."""
    for node in facts.nodes:
        if node.target is torch.ops.tcport.paged_attention.default:
            k_cache, v_cache = node.args[1:3]
            if isinstance(k_cache, Node) and isinstance(v_cache, Node):
                yield node, (k_cache, v_cache)


def reads(cache: Node, write: SlotWrite) -> bool:
    """Whether a cache that an attention reads is the one written."""
    tensor = tensor_of(cache)
    return (
        tensor is not None
        and aliasing.aliases(cache, write.target.changed)
        and not aliasing.disjoint(tensor, write.region)
    )


def _page_size(facts: GraphFacts, root: Node, slots: Expr) -> Expr:
    """Slots per page of a cache that is flattened: as its readers see it, else one."""
    for _, caches in attentions(facts):
        for cache in caches:
            page_size = shape_of(cache)[1]
            if aliasing.aliases(cache, root) and divided(slots, page_size) is not None:
                return page_size
    return sympy.Integer(1)
