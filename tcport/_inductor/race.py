"""Inductor's own autotuning for nodes that tcport lowers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import config, ir
from torch._inductor.select_algorithm import NoValidChoicesError, autotune_select_algorithm
from torch._subclasses.fake_tensor import unset_fake_temporarily


@dataclasses.dataclass(frozen=True)
class Race:
    """Several ways to lower one node, of which Inductor's autotuning takes the fastest.

    Attributes:
        name: what Inductor's log calls it.
        device: where the ways run.
    """

    name: str
    device: torch.device
    ways: Sequence[Way]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to lower a node.

    Attributes:
        name: what Inductor's log calls it. identity: what stands for it in Inductor's cache of timings.
        run: runs it once, on real tensors.
        emission: says how to lower the node this way; called for the winner alone.
    """

    name: str
    identity: str
    run: Callable[[], object]
    emission: Callable[[], Any]


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Within the compile of a graph: operations on real tensors, which are run."""
    with unset_fake_temporarily(), torch.no_grad():
        yield


def winner(race: Race) -> Callable[[], Any]:
    """The emission of the way that Inductor's autotuning chooses; the timings are kept and logged as its own are."""
    won: list[Callable[[], Any]] = []

    class Choice(ir.ChoiceCaller):
        """A way as Inductor sees it. It brings tensors of its own: what Inductor calls it with has no part in it."""

        def __init__(self, way: Way) -> None:
            super().__init__(way.name, [], layout, "")
            self.way = way

        def hash_key(self) -> str:
            return self.way.identity

        def to_callable(self) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.way.run()

        def output_node(self) -> Any:
            won.append(self.way.emission)

    layout = ir.FixedLayout(race.device, torch.float32, [sympy.S.One], [sympy.S.One])
    with config.patch(autotune_in_subproc=False), torch.no_grad(), contextlib.suppress(NoValidChoicesError):
        autotune_select_algorithm(race.name, list(map(Choice, race.ways)), [], layout, return_multi_template=False)
    return won[-1] if won else race.ways[0].emission
