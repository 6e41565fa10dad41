"""Graph passes: how one is written and registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.fx

from tcport.device import DeviceProfile
from tcport.errors import PassRegistrationError
from tcport.fingerprint import source_identity
from tcport.options import Options

Stage = Literal["dynamo", "functional", "inplace"]
"""Where a pass runs.

``dynamo``: on the graph as Dynamo captured it, before tcport looks for attention in it; torch functions and methods,
values in ``meta["example_value"]``. ``functional``: on the functional ATen graph, before Inductor's own post-grad
passes; its pre-grad and joint-graph passes have run. Values in ``meta["val"]``. ``inplace``: on the same graph after
them, the last moment at which a copy can still be avoided.
"""

STAGES: tuple[Stage, ...] = ("dynamo", "functional", "inplace")

PassFn = Callable[[torch.fx.Graph, "PassContext"], int]
Condition = Callable[[torch.fx.Graph], "str | None"]
"""Says why a graph does not meet it, or None where it does; its ``__name__`` names it in messages."""


@dataclasses.dataclass(frozen=True)
class PassContext:
    """What a pass may ask about the compile it runs in, and what it may say about its work.

    Attributes:
        options: the options of this compile.
        profile: the facts of a device, by ``torch.device``.
    """

    options: Options
    profile: Callable[[torch.device], DeviceProfile]
    _merged: dict[torch.fx.Node, torch.fx.Node] = dataclasses.field(default_factory=dict, repr=False)
    _notes: list[str] = dataclasses.field(default_factory=list, repr=False)
    _saved: list[tuple[int, Any]] = dataclasses.field(default_factory=list, repr=False)

    def merged(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """Say that the effect of ``old``, which writes to its arguments, is now carried by ``new``.

        Without it, a pass that removes such a node is refused.
        """
        self._merged[old] = new

    def leave(self, node: torch.fx.Node, reason: str) -> None:
        """Say why a node that looks like a match was left as it is; the reason stands in the compile's report."""
        self._notes.append(f"{node.name}: {reason}")

    def note(self, text: str) -> None:
        """Say something else about this pass's work, such as what it saved."""
        self._notes.append(text)

    def saved(self, operations: int, values: Iterable[torch.Tensor | torch.fx.Node]) -> None:
        """Say what a match saves against running the graph operation by operation; the report has the sum of a pass.

        Args:
            operations: how many fewer there are. values: those that are no longer stored and loaded again, or the nodes
                of the graph as it was whose ``meta["val"]`` they are.
        """
        stored = [v.meta["val"] if isinstance(v, torch.fx.Node) else v for v in values]
        self._saved.append((operations, 2 * sum(value.numel() * value.element_size() for value in stored)))

    def carrier(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node that carries the effect of ``node`` now, by what :meth:`merged` was told."""
        seen = set()
        while node in self._merged and node not in seen:
            seen.add(node)
            node = self._merged[node]
        return node

    def take_notes(self) -> tuple[str, ...]:
        """The notes since this was last called."""
        notes = tuple(self._notes)
        self._notes.clear()
        return notes

    def take_saved(self) -> tuple[int, Any]:
        """Operations and bytes that were saved since this was last called; bytes may be an expression in sizes."""
        saved = tuple(map(sum, zip(*self._saved, strict=True))) or (0, 0)
        self._saved.clear()
        return saved  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class GraphPass:
    """A registered pass; the attributes are those of :func:`register_pass`."""

    name: str
    run: PassFn
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    stage: Stage = "functional"
    requires: tuple[Condition, ...] = ()
    ensures: tuple[Condition, ...] = ()
    must_match: bool = False
    params: Any = None

    def identity(self) -> str:
        """What the cache key knows of the pass: its name, place, sources and parameters."""
        conditions = [source_identity(condition) for condition in (*self.requires, *self.ensures)]
        place = (self.stage, self.after, self.before, self.must_match)
        return f"{self.name} {place} {source_identity(self.run)} {conditions} {self.params!r}"


_PASSES: dict[str, GraphPass] = {}


def register_pass(
    name: str,
    *,
    after: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    stage: Stage = "functional",
    requires: tuple[Condition, ...] = (),
    ensures: tuple[Condition, ...] = (),
    must_match: bool = False,
    params: Any = None,
) -> Callable[[PassFn], PassFn]:
    """Register a graph pass; it runs in every later compile until it is unregistered.

    The pass is called with the graph and a :class:`PassContext`, changes the graph in place, and returns its number of
    matches. New nodes need no metadata: it is derived. The graph is checked after the pass, see
    :mod:`tcport.pass_checks`.

    Args:
        name: how options and reports call it; unique among the registered passes.
        after, before: names of passes that must run earlier or later, where they run at all; naming a pass that does
            not exist is an error when the order is solved. Passes of different stages are ordered by their stages.
        stage: see :data:`Stage`.
        requires, ensures: what must hold before and after: functions from a graph to None or to the reason why it does
            not hold. Ready-made ones are in :mod:`tcport.graph_facts`.
        must_match: matching nothing is an error.
        params: anything with a stable ``repr`` that the pass's behaviour depends on beside the file it is written in
            and the values it closes over.

    Raises:
        PassRegistrationError: the name is taken, the stage is unknown, or an argument is of the wrong kind.
    """
    if not isinstance(name, str):
        raise PassRegistrationError(
            f"A pass is registered with the name {name!r}.",
            'Write @tcport.register_pass("its_name") over the function.',
        )
    if stage not in STAGES:
        raise PassRegistrationError(
            f"Pass {name!r} names the stage {stage!r}.", f"Give one of {', '.join(map(repr, STAGES))}."
        )
    for what, names in (("after", after), ("before", before)):
        if isinstance(names, str) or not all(isinstance(other, str) for other in names):
            raise PassRegistrationError(
                f"Pass {name!r} has {what}={names!r}.", f"Give a tuple of pass names, such as {what}=('select_tiles',)."
            )
    for what, conditions in (("requires", requires), ("ensures", ensures)):
        if not isinstance(conditions, (tuple, list)) or not all(map(callable, conditions)):
            raise PassRegistrationError(
                f"Pass {name!r} has {what}={conditions!r}.",
                "Give a tuple of functions from a graph to None or a reason; see tcport.graph_facts.",
            )

    def register(run: PassFn) -> PassFn:
        if not callable(run):
            raise PassRegistrationError(f"Pass {name!r} is {run!r}.", "Give a function of a graph and a context.")
        if name in _PASSES:
            raise PassRegistrationError(
                f"A pass named {name!r} is registered already.",
                "Choose another name, or call tcport.unregister_pass first.",
            )
        _PASSES[name] = GraphPass(
            name, run, tuple(after), tuple(before), stage, tuple(requires), tuple(ensures), must_match, params
        )
        return run

    return register


def unregister_pass(name: str) -> None:
    """Forget a registered pass.

    Raises:
        PassRegistrationError: no pass has that name.
    """
    if name not in _PASSES:
        known = ", ".join(sorted(_PASSES)) or "none"
        raise PassRegistrationError(f"There is no pass named {name!r}.", f"Registered passes: {known}.")
    del _PASSES[name]


@contextmanager
def registered_pass(run: PassFn, *, name: str, **options: Any) -> Iterator[None]:
    """A pass registered for the length of a ``with`` block; arguments as :func:`register_pass`."""
    register_pass(name=name, **options)(run)
    try:
        yield
    finally:
        _PASSES.pop(name, None)


def registered_passes() -> dict[str, GraphPass]:
    """The registered passes by name, in order of registration."""
    return dict(_PASSES)
