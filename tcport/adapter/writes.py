"""Spelling: new keys and new values stored into their caches by two indexed writes to the same slots.

Understood: ``cache[page, slot] = x``, ``index_put_``, ``index_copy_`` and ``scatter_`` along a dimension of slots,
``copy_`` into a slice. Slots may be pages and offsets, or places in a flattened view; layouts may be any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import torch
from torch.fx import Node

from tcport.adapter import aliasing
from tcport.adapter.algebra import Expr, Space
from tcport.adapter.emit import Emitter, Groups
from tcport.adapter.graph import GraphFacts
from tcport.adapter.reader import Reader
from tcport.adapter.registry import register_matcher
from tcport.adapter.report import Match, Rejected
from tcport.adapter.sizes import tensor_of
from tcport.adapter.slots import SlotWrite, attentions, reads, slot_write
from tcport.adapter.stored import keeps_value


@register_matcher("writes", stage="write")
def match_writes(facts: GraphFacts, node: Node) -> Match | None:
    """Match the write at which a pair of K and V can be stored at once; the other write of the pair goes with it."""
    writes: _Writes = facts.shared("writes", _Writes)
    return writes.match(node)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two writes to the same slots, in graph order, and at which of the two both may happen."""

    first: SlotWrite
    second: SlotWrite
    anchor: SlotWrite


class _Writes:
    """All slot writes of a graph, paired."""

    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self._read()
        if facts.news:  # the writes read first may spell a size otherwise than the last
            self._read()
        self.pairs: dict[Node, _Pair] = {}
        for write in self.writes.values():
            if write.node not in self.pairs and write.node not in self.reasons:
                self._pair(write)

    def _read(self) -> None:
        self.reader = Reader(self.facts, Space())
        self.writes: dict[Node, SlotWrite] = {}
        self.reasons: dict[Node, Rejected] = {}
        for node in self.facts.nodes:
            try:
                write = slot_write(self.reader, node)
            except Rejected as rejected:
                self.reasons[node] = rejected
            else:
                if write is not None:
                    self.writes[node] = write

    def match(self, node: Node) -> Match | None:
        """The match anchored at a node; None at the other write of a pair, and where nothing is written."""
        pair = self.pairs.get(node)
        if pair is None:
            if node in self.reasons:
                raise self.reasons[node]
            return None
        if node is not pair.anchor.node:
            return None
        other = pair.first if pair.anchor is pair.second else pair.second
        key, value = self._key_first(pair)

        def build(emit: Emitter) -> None:
            _build(emit, self.reader, key, value)
            for write in (pair.first, pair.second):
                write.node.replace_all_uses_with(write.target.changed)  # an in-place result is its operand

        note = "a negative slot is skipped, where PyTorch wraps it around"
        return Match("kv_write", node, build, carried=frozenset({other.node}), notes=(note,), matcher="writes")

    def _pair(self, first: SlotWrite) -> None:
        """Pair a write with the nearest later one that can be its other half, or say why there is none."""
        second = next((write for write in self.writes.values() if self._belong(first, write)), None)
        if second is None:
            cache = first.target.cache.node.name
            self.reasons[first.node] = Rejected("pairing", f"no write to another cache than {cache} has the same slots")
            return
        obstacle = self._seen_between(first, second, first)
        anchor = second
        if obstacle is not None:
            anchor = first
            if self._seen_between(first, second, second) is not None:
                reason = f"{obstacle.name} uses the cache between {first.node.name} and {second.node.name}"
                self.reasons[first.node] = self.reasons[second.node] = Rejected("pairing", reason)
                return
        self.pairs[first.node] = self.pairs[second.node] = _Pair(first, second, anchor)

    def _belong(self, first: SlotWrite, second: SlotWrite) -> bool:
        """Whether two writes could be K and V of the same tokens."""
        if second.node in self.pairs or self.facts.position[second.node] <= self.facts.position[first.node]:
            return False
        if first.where(self.reader) != second.where(self.reader) or first.region.dtype != second.region.dtype:
            return False
        sizes = self.reader.space.sizes
        shapes = [(*(sizes[h] for h in w.head), sizes.get(w.place, 1)) for w in (first, second)]
        apart = not aliasing.aliases(first.target.changed, second.target.changed)
        if shapes[0] != shapes[1] or not (apart or aliasing.disjoint(first.region, second.region)):
            return False
        return self._linked(first, second)

    def _linked(self, a: SlotWrite, b: SlotWrite) -> bool:
        """Whether one attention reads both, or none reads either."""
        for caches in self._attentions(after=b):
            read = [any(reads(cache, write) for cache in caches) for write in (a, b)]
            if any(read):
                return all(read)
        return True

    def _attentions(self, after: SlotWrite) -> list[tuple[Node, Node]]:
        """The caches of all attentions, in the order in which they follow a write, then those before it."""
        start = self.facts.position[after.node]
        found = [(self.facts.position[node] < start, caches) for node, caches in attentions(self.facts)]
        return [caches for _, caches in sorted(found, key=lambda item: item[0])]

    def _key_first(self, pair: _Pair) -> tuple[SlotWrite, SlotWrite]:
        """Which of a pair is K: what an attention reads as such, else the first."""
        for k_cache, v_cache in self._attentions(after=pair.second):
            if reads(k_cache, pair.first) and reads(v_cache, pair.second):
                break
            if reads(k_cache, pair.second) and reads(v_cache, pair.first):
                return pair.second, pair.first
        return pair.first, pair.second

    def _seen_between(self, first: SlotWrite, second: SlotWrite, moved: SlotWrite) -> Node | None:
        """A node between two writes that reads or writes what ``moved`` writes, so that it cannot be moved past."""
        start, stop = (self.facts.position[write.node] for write in (first, second))
        for node in self.facts.nodes[start + 1 : stop]:
            changed = aliasing.mutated(node)
            for operand in node.all_input_nodes:
                tensor = tensor_of(operand)
                if tensor is None or not aliasing.aliases(operand, moved.target.changed):
                    continue
                only_views = aliasing.aliases(node, operand) and not changed
                if only_views or aliasing.disjoint(aliasing.reach(operand, node), moved.region):
                    continue
                return node
        return None


def _build(emit: Emitter, reader: Reader, key: SlotWrite, value: SlotWrite) -> None:
    device = key.region.device
    emit.use(reader.space, reader.forms, device)
    slots = emit.integer(key.slots, [key.tokens])
    scales = {}
    if key.region.dtype == torch.int8:
        one = emit.call(torch.ones, (), dtype=torch.float32, device=device)
        scales = {"k_scale": one, "v_scale": one}
    emit.call(
        torch.ops.tcport.kv_write.default,
        *(_new(emit, reader, write) for write in (key, value)),
        *(_cache(emit, write) for write in (key, value)),
        slots,
        **scales,
    )


def _new(emit: Emitter, reader: Reader, write: SlotWrite) -> Node:
    """What is stored, as [tokens, heads, dim], with the value that the cache would hold."""
    dtype = write.region.dtype
    groups: Groups = [write.tokens, write.head, write.dim]
    path = reader.path(write.target.value)
    usable = path[:1]
    for outer, inner in itertools.pairwise(path):
        types = [_dtype(step.node) for step in (inner, outer)]
        if not (keeps_value(*types) or types[1] == dtype):
            break
        usable.append(inner)
    for candidate in reversed(usable):
        if emit.fresh(candidate):
            with contextlib.suppress(Rejected):
                node = emit.view(candidate, groups)
                if dtype.itemsize == 1:  # the cast of PyTorch, whose result kv_write stores as it is
                    return emit.call("to", emit.call("to", node, dtype), torch.float32)
                return emit.call("to", node, dtype) if _dtype(node) == torch.float64 else node
    raise Rejected("slots", f"the value of {write.node.name} cannot be laid out as [tokens, heads, dim]")


def _cache(emit: Emitter, write: SlotWrite) -> Node:
    groups = [[write.page], _list(write.place), write.head, write.dim]
    cache = emit.view(write.cache, groups, whole={write.page, write.place})
    if not aliasing.aliases(cache, write.cache.node):
        raise Rejected("layout", f"{write.cache.node.name} cannot be viewed as [pages, page, heads, dim]")
    return cache


def _list(coord: Expr) -> list[Expr]:
    return [] if coord == 0 else [coord]


def _dtype(node: Node) -> torch.dtype:
    tensor = tensor_of(node)
    if tensor is None:
        raise Rejected("dtype", f"{node.name} has no example value")
    return tensor.dtype
