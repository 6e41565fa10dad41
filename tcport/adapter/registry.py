"""The matchers, one per spelling, and the decorator that adds one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.fx import Node

from tcport.adapter.graph import GraphFacts
from tcport.adapter.report import Match, Rejection
from tcport.errors import ArgumentError

MatchFunction = Callable[[GraphFacts, Node], "Match | Rejection | None"]
Stage = Literal["attention", "write"]
STAGES: tuple[Stage, ...] = ("attention", "write")
"""Matchers of one stage see the graph that the stage before has left."""


@dataclasses.dataclass(frozen=True)
class Matcher:
    """A spelling: a name, the function that recognises it, and the calls it is asked about.

    Attributes:
        name: unique; it appears in the report.
        match: called with the graph's facts and a node. Returns a Match, a Rejection, or None for "not mine"; it may
            raise :class:`~tcport.adapter.report.Rejected` anywhere to reject.
        stage: ``attention`` matchers run first; ``write`` matchers see a graph without the gathers they removed.
        targets: functions or method names of the nodes it wants to see; None for all calls.
    """

    name: str
    match: MatchFunction
    stage: Stage
    targets: tuple[Any, ...] | None

    def wants(self, node: Node) -> bool:
        """Whether to ask this matcher about a node."""
        if node.op not in ("call_function", "call_method"):
            return False
        return self.targets is None or node.target in self.targets


_matchers: dict[str, Matcher] = {}


def register_matcher(
    name: str, *, stage: Stage = "attention", targets: Sequence[Any] | None = None
) -> Callable[[MatchFunction], MatchFunction]:
    """Add a matcher; of several that match a node, the one registered first wins.

    Args:
        name: a name no other matcher has.
        stage: when to run it, see :class:`Matcher`.
        targets: what the node must call: functions (``call_function``) or names (``call_method``). None: anything.

    Raises:
        ArgumentError: the name is taken, or the stage is unknown.
    """
    if name in _matchers:
        raise ArgumentError(f"A matcher named {name!r} is registered already.", "Choose another name.")
    if stage not in STAGES:
        raise ArgumentError(f"stage is {stage!r}; allowed: {', '.join(STAGES)}.", "Pass one of these.")

    def register(match: MatchFunction) -> MatchFunction:
        _matchers[name] = Matcher(name, match, stage, None if targets is None else tuple(targets))
        return match

    return register


def unregister_matcher(name: str) -> None:
    """Remove a matcher, for example at the end of a test.

    Raises:
        ArgumentError: there is none of that name.
    """
    if _matchers.pop(name, None) is None:
        raise ArgumentError(f"There is no matcher named {name!r}.", f"Known: {', '.join(_matchers)}.")


def registered_matchers() -> tuple[Matcher, ...]:
    """All matchers, in order of registration."""
    return tuple(_matchers.values())
