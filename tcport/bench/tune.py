"""Measured tuning: which tile beats the model's choice for one shape of call, by how much, and that it is right."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcport.bench.accuracy import WrongResultError, check
from tcport.bench.cases import Case
from tcport.bench.inputs import Inputs, copies_of, make_inputs
from tcport.bench.timing import alternating
from tcport.debug import poisoned
from tcport.device import DeviceProfile
from tcport.errors import ArgumentError, KernelBuildError
from tcport.failures import cause_of, first_line
from tcport.kernels.call import AttentionCall
from tcport.lowering.candidate import Candidate
from tcport.lowering.paged_attention import every_tile
from tcport.lowering.spec import attention_spec, opened
from tcport.tiling.tuned import Measured, facts_of, tile_of

PROMOTION = 1.02
"""How much faster a tile must be, in every set of pairs: times of two runs differ by 1-3%."""

_FINALISTS = 3
_SCREENING_ROUNDS, _PAIRS = 3, 21

Run = Callable[[Inputs], object]
Timer = Callable[[Sequence[Run], Sequence[Inputs], int], list[tuple[float, ...]]]
"""``timer(runs, inputs, rounds)``: the time of each run on one of the inputs, round by round."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What was found for one shape of call.

    Attributes:
        facts: of the shape. cases: the sizes it was measured at.
        model: the first of the model's choices that works. best: the fastest tile found, perhaps the same.
        gain: the time of ``model`` over that of ``best`` in pairs, the smaller of two sets; 1 where they are the same.
        tried: tiles that ran and were right. refused: those that did not or were not, with the reason.
        all_tried: whether time was left for every legal tile.
    """

    facts: dict[str, Any]
    cases: tuple[Case, ...]
    model: Candidate
    best: Candidate
    gain: float
    tried: int
    refused: tuple[tuple[Candidate, str], ...]
    all_tried: bool

    @property
    def promoted(self) -> Measured | None:
        """The entry of the device's table that it is worth; None where the model's choice stays."""
        if self.gain < PROMOTION:
            return None
        names = tuple(case.name for case in self.cases)
        tile, model = tile_of(self.best.config), str(self.model.uncut.config)
        return Measured(self.facts, tile, model, round(self.gain, 4), names)


def shapes(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases by shape of call: those that take one kernel with one tile, whatever their sizes.

    Raises:
        ArgumentError: a case is a cache write, whose tiles all move the same bytes.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if case.kind == "write":
            raise ArgumentError(f"{case.name} is a cache write.", "Tune cases of attention.")
        shape = dataclasses.replace(case, kind="decode", lens=(1,), q_lens=case.q_lens and (1,), label="")
        groups.setdefault(repr(shape), []).append(case)
    return list(groups.values())


def tune(
    cases: Sequence[Case],
    profile: DeviceProfile,
    *,
    seconds: float = 60.0,
    memory: float = 2e9,
    device: torch.device | str = "cuda",
    timer: Timer = alternating,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Measure the tiles of one shape of call (see :func:`shapes`) against the model's choice.

    Tiles are tried in the model's order. Each is run over memory full of NaN and compared with fp32 attention before it
    is timed. The fastest then run in pairs with the model's choice, one after the other and the other way round, twice
    on inputs of their own: what counts is the smaller of the two medians.

    Args:
        seconds: no tile is begun after this time; the pairs come on top of it.
        memory: bytes of KV caches that inputs may take at a time.

    Raises:
        ArgumentError: one set of a case's inputs is larger than ``memory``.
        KernelBuildError: no tile works.
        OutOfResourcesError: no tile is legal.
    """
    end = clock() + seconds
    torch.manual_seed(0)
    inputs = [_inputs(case, device, memory) for case in cases]
    spec = opened(attention_spec(AttentionCall.of(**inputs[0][0].arguments)))
    times: dict[Candidate, list[float]] = {}
    refused: list[tuple[Candidate, str]] = []
    links = every_tile(spec, profile)
    for link in links:
        if times and clock() > end:
            break
        try:
            for each in inputs:
                _require_right(link, each[0])
            times[link] = [_median(timer([_run(link)], each, _SCREENING_ROUNDS)) for each in inputs]
        except Exception as error:
            if not isinstance(error, WrongResultError) and cause_of(error) not in ("resources", "build"):
                raise
            refused.append((link, first_line(error)))
    if not times:
        raise KernelBuildError(f"No tile works: {refused[0][1].rstrip('.')}.", "Look at the chain with tcport.explain.")
    model = next(iter(times))
    finalists = sorted(times, key=lambda link: _mean(times[link]))[:_FINALISTS]
    gains = {model: 1.0} | {link: _gain(model, link, inputs, timer) for link in finalists if link != model}
    best = max(gains, key=lambda link: gains[link])
    done = len(times) + len(refused) == len(links)
    return Tuning(facts_of(spec), tuple(cases), model, best, gains[best], len(times), tuple(refused), done)


def _gain(model: Candidate, link: Candidate, inputs: Sequence[Sequence[Inputs]], timer: Timer) -> float:
    """The smaller of two sets of pairs; the second begins with the other of the two."""
    first = [_ratio(timer([_run(model), _run(link)], each, _PAIRS)) for each in inputs]
    second = [1 / _ratio(timer([_run(link), _run(model)], each, _PAIRS)) for each in inputs]
    return min(_mean(first), _mean(second))


def _ratio(rounds: Sequence[tuple[float, ...]]) -> float:
    return statistics.median(first / second for first, second in rounds)


def _median(rounds: Sequence[tuple[float, ...]]) -> float:
    return statistics.median(only for (only,) in rounds)


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _run(link: Candidate) -> Run:
    return functools.partial(_attend, link)


def _attend(link: Candidate, inputs: Inputs) -> torch.Tensor:
    return link.run(AttentionCall.of(**inputs.arguments), lambda kernel: kernel)[0]


def _require_right(link: Candidate, inputs: Inputs) -> None:
    with poisoned():
        out = _attend(link, inputs)
    check(inputs, out)


def _inputs(case: Case, device: torch.device | str, memory: float) -> list[Inputs]:
    if case.kv_bytes > memory:
        raise ArgumentError(
            f"{case.name} has a KV cache of {case.kv_bytes / 1e9:.2g} GB, where {memory / 1e9:.2g} GB are allowed.",
            "Allow more memory, or tune a smaller batch: the tile is for all sizes.",
        )
    return make_inputs(case, device, copies_of(case, memory))
