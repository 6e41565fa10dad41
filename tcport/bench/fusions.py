"""``bench --suite fusions``: what graph passes fuse, beside what runs without them, on the same inputs in one run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tcport.bench.accuracy import WrongResultError
from tcport.bench.inputs import ROTATED_BYTES
from tcport.bench.timing import alternating

OURS = "tcport"
MOST_COPIES = 48


@dataclasses.dataclass(frozen=True)
class Peer:
    """What is run instead.

    Attributes:
        run: the timed call on one set of inputs.
        goal: how many times our time it shall take at least; None: for information.
        checked: whether it computes the same, and is held against fp32 too.
    """

    run: Callable[[Any], Any]
    goal: float | None = None
    checked: bool = True


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One comparison.

    Attributes:
        make: one set of inputs on a device.
        ours: the timed call of the kernel that the chain names first.
        peers: by name.
        results: from inputs, and what a call returned on them, to the tensors that were computed.
        expected: the same from inputs alone, in fp32.
        moved: bytes that ours cannot but read and write. held: bytes of one set of inputs of which the L2 cache should
            hold nothing.
        tolerance: the largest error, as a part of the largest value of a result.
    """

    name: str
    make: Callable[[torch.device], Any]
    ours: Callable[[Any], Any]
    peers: dict[str, Peer]
    results: Callable[[Any, Any], Sequence[Tensor]]
    expected: Callable[[Any], Sequence[Tensor]]
    moved: int
    held: int
    tolerance: float

    @property
    def copies(self) -> int:
        """How many sets of inputs leave the L2 cache."""
        return max(2, min(MOST_COPIES, -(-int(ROTATED_BYTES) // self.held)))


@dataclasses.dataclass(frozen=True)
class FusionRow:
    """What was measured: microseconds by name, ours first; our error; goals by peer, as of :class:`Peer`."""

    name: str
    times: dict[str, float]
    error: float
    moved: int
    goals: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Each peer's time over ours."""
        return {name: time / self.times[OURS] for name, time in self.times.items() if name != OURS}

    @property
    def missed(self) -> list[str]:
        """The peers whose goal is not reached."""
        return [name for name, goal in self.goals.items() if self.ratios[name] < goal]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ratios": self.ratios, "missed": self.missed}


def measure_fusion(fusion: Fusion, rounds: int = 9) -> FusionRow:
    """Time one comparison on the current CUDA device.

    Raises:
        WrongResultError: results of ours, or of a peer, are not those of fp32.
    """
    inputs = [fusion.make(torch.device("cuda")) for _ in range(fusion.copies)]
    # Ours first: memory that a peer has freed, with the right results in it, cannot pass for ours.
    error = check_fusion(fusion, OURS, fusion.ours, fusion.make(torch.device("cuda")))
    for name, peer in fusion.peers.items():
        if peer.checked:
            check_fusion(fusion, name, peer.run, fusion.make(torch.device("cuda")))
    runs = [fusion.ours, *(peer.run for peer in fusion.peers.values())]
    medians = map(statistics.median, zip(*alternating(runs, inputs, rounds), strict=True))
    times = dict(zip((OURS, *fusion.peers), medians, strict=True))
    goals = {name: peer.goal for name, peer in fusion.peers.items() if peer.goal is not None}
    return FusionRow(fusion.name, times, error, fusion.moved, goals)


def check_fusion(fusion: Fusion, name: str, run: Callable[[Any], Any], inputs: Any) -> float:
    """The largest error of one call's results, as a part of the largest value of each.

    Raises:
        WrongResultError: it is beyond what the comparison allows, or not finite.
    """
    expected = fusion.expected(inputs)
    results = fusion.results(inputs, run(inputs))
    error = max(_distance(a.float(), b.float()) for a, b in zip(results, expected, strict=True))
    if not error <= fusion.tolerance:
        raise WrongResultError(
            f"{fusion.name}: results of {name} are off by {error:.3g} where {fusion.tolerance:g} is allowed.",
            "Report it with this case; its time is not printed.",
        )
    return error


def _distance(actual: Tensor, expected: Tensor) -> float:
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    return error if error == error else float("inf")
