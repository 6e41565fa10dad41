"""What the adapter says about every node that looks like paged attention or a cache write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from torch.fx import Node

if TYPE_CHECKING:
    from tcport.adapter.emit import Emitter

Kind = Literal["paged_attention", "kv_write", "canonical"]


@dataclasses.dataclass(frozen=True)
class Match:
    """A node that means the same as one canonical operator.

    Attributes:
        kind: the operator it becomes; ``canonical`` for a node that calls one already and stays as it is.
        node: the node whose value the operator gives.
        build: emits the replacement and returns the node that takes the place of ``node`` (None: nothing to replace).
        interior: nodes that exist only to compute ``node``. They disappear with it, so nothing else may use them.
        carried: other nodes that the replacement carries out along with ``node``; ``build`` redirects their users.
        notes: what a reader should know about this match, one sentence each.
        matcher: name of the matcher that found it.
    """

    kind: Kind
    node: Node
    build: Callable[[Emitter], Node | None] | None = dataclasses.field(default=None, repr=False, compare=False)
    interior: frozenset[Node] = dataclasses.field(default=frozenset(), repr=False)
    carried: frozenset[Node] = dataclasses.field(default=frozenset(), repr=False)
    notes: tuple[str, ...] = ()
    matcher: str = ""

    def __str__(self) -> str:
        return f"{self.node.name}: {self.kind} ({self.matcher})" + "".join(f"; {note}" for note in self.notes)


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A node that looks like attention or a cache write and was left alone.

    Attributes:
        node: the node.
        rule: the rule that it broke, one of :data:`RULES`.
        reason: one sentence naming the offending node or value.
        matcher: name of the matcher that refused it.
    """

    node: Node
    rule: str
    reason: str
    matcher: str = ""

    def __str__(self) -> str:
        return f"{self.node.name}: left alone [{self.rule}]: {self.reason}"


RULES = {
    "not-paged": "K and V are rows of a cache, reached through a block table of page ids.",
    "tables-differ": "K and V are reached through the same block table, at the same positions.",
    "layout": "The cache, the query and the result are views the canonical operator can be given.",
    "sizes": "The sizes agree with the canonical operator for every value that a symbolic size may take.",
    "dtype": "No conversion on the way loses what the canonical operator would keep, or keeps what it would lose.",
    "softmax": "The weights are a softmax over all the keys, and over nothing else.",
    "logits": "The logits are scale * q.k, possibly capped, plus a mask.",
    "scale": "The scale is a number.",
    "dropout": "No weight is dropped.",
    "mask": "A mask says of every key only whether it is visible, and says the same to all heads.",
    "reused": "What the match would remove is used by nothing else.",
    "written": "Nothing that the canonical operator reads changes between the original read and the operator.",
    "gradient": "No gradient is recorded through the result.",
    "pairing": "A write of K and a write of V go to the same slots, with nothing in between that sees a difference.",
    "slots": "A write stores whole tokens (all heads, all of the head dim) into slots of a cache.",
}
"""Every rule by name: what must hold for a rewrite."""


class Rejected(Exception):
    """Raised inside a matcher to leave its node alone; :func:`tcport.adapter.adapt` turns it into a Rejection."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(rule, reason)
        self.rule = rule
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class AdapterReport:
    """Everything the adapter decided about one graph, in graph order."""

    records: tuple[Match | Rejection, ...]

    @property
    def matches(self) -> tuple[Match, ...]:
        """What was rewritten, or was canonical already."""
        return tuple(record for record in self.records if isinstance(record, Match))

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """What was left alone, and why."""
        return tuple(record for record in self.records if isinstance(record, Rejection))

    def __str__(self) -> str:
        return "\n".join(map(str, self.records)) or "no attention and no cache write found"
