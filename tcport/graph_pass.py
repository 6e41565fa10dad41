"""Graph passes: how one is written and registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.fx

from tcport.device import DeviceProfile
from tcport.errors import PassRegistrationError
from tcport.fingerprint import source_identity
from tcport.options import Options

Stage = Literal["functional", "dynamo"]
PassFn = Callable[[torch.fx.Graph, "PassContext"], int]


@dataclasses.dataclass(frozen=True)
class PassContext:
    """What a pass may ask about the compile it runs in.

    Attributes:
        options: the options of this compile.
        profile: the facts of a device, by ``torch.device``.
    """

    options: Options
    profile: Callable[[torch.device], DeviceProfile]
    _merged: dict[torch.fx.Node, torch.fx.Node] = dataclasses.field(default_factory=dict, repr=False)

    def merged(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """Say that the effect of ``old``, which writes to its arguments, is now carried by ``new``.

        Without it, a pass that removes such a node is refused.
        """
        self._merged[old] = new

    def merges(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """What has been declared with :meth:`merged`."""
        return self._merged


@dataclasses.dataclass(frozen=True)
class GraphPass:
    """A registered pass.

    Attributes:
        name: how options and reports call it.
        run: takes the graph and a context, changes the graph in place, returns the number of matches.
        after, before: names of passes it must follow or precede, where they run at all.
        stage: ``"functional"`` runs on the functional ATen graph; ``"dynamo"`` on the graph as Dynamo captured it.
        params: whatever else its behaviour depends on; part of its identity.
    """

    name: str
    run: PassFn
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    stage: Stage = "functional"
    params: Any = None

    def identity(self) -> str:
        """What the cache key knows of the pass: its name, source and parameters."""
        return f"{self.name} {source_identity(self.run)} {self.params!r}"


_PASSES: dict[str, GraphPass] = {}


def register_pass(
    *,
    name: str,
    after: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    stage: Stage = "functional",
    params: Any = None,
) -> Callable[[PassFn], PassFn]:
    """Register a graph pass; it runs in every later compile until it is unregistered.

    Args:
        name: unique among the registered passes.
        after, before: names of passes that must run earlier or later; naming a pass that does not exist is an error
            when the order is solved.
        stage: see :class:`GraphPass`.
        params: anything with a stable ``repr`` that the pass's behaviour depends on beside its source.

    Raises:
        PassRegistrationError: the name is taken, or the stage is unknown.
    """
    if stage not in ("functional", "dynamo"):
        raise PassRegistrationError(f"Pass {name!r} names the stage {stage!r}.", "Give 'functional' or 'dynamo'.")

    def register(run: PassFn) -> PassFn:
        if name in _PASSES:
            raise PassRegistrationError(
                f"A pass named {name!r} is registered already.",
                "Choose another name, or call tcport.unregister_pass first.",
            )
        _PASSES[name] = GraphPass(name, run, after, before, stage, params)
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
    """A pass registered for the length of a ``with`` block."""
    register_pass(name=name, **options)(run)
    try:
        yield
    finally:
        _PASSES.pop(name, None)


def registered_passes() -> dict[str, GraphPass]:
    """The registered passes by name, in order of registration."""
    return dict(_PASSES)
