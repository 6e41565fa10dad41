"""Every legal tile of a case's kernel, timed: how far the optimizer's first choice is from the best there is."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcport.bench.accuracy import WrongResultError, check, sample
from tcport.bench.cases import Case
from tcport.bench.inputs import Inputs, copies_of, make_inputs
from tcport.bench.timing import alternating, glance
from tcport.debug import poisoned
from tcport.device import DeviceProfile
from tcport.failures import cause_of, first_line
from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall
from tcport.kernels.triton_splits import number_of_parts, number_of_splits
from tcport.lowering.spec import attention_spec
from tcport.tiling import rank_tiles

_SLOW = 3.0
"""A tile this many times as slow as the fastest so far is looked at once and not timed again."""
_LAUNCHES = 1000.0  # microseconds that the host may take for one call, which a look at it includes
_ROUNDS, _FINAL_ROUNDS, _FINALISTS, _CLOSE = 3, 11, 6, 1.05
_PROMPT_COPIES = 4  # a prompt's time is in its products: it need not leave the L2

Run = Callable[[Inputs], object]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One tile's time.

    Attributes:
        how: ``once`` (one call, launch included; only that it is slow is known), ``graph`` (median of replays), or
            ``paired`` (median of replays that alternate with those of the other good tiles).
    """

    tile: TileConfig
    microseconds: float
    how: str = "graph"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The times of one case.

    Attributes:
        timings: as the optimizer ranks the tiles; split counts beside the optimizer's own follow.
        refused: tiles that the device would not run, with its words.
        wrong: tiles that gave wrong numbers.
    """

    case: Case
    timings: tuple[Timing, ...]
    refused: tuple[tuple[TileConfig, str], ...] = ()
    wrong: tuple[tuple[TileConfig, str], ...] = ()

    @property
    def first(self) -> Timing:
        return self.timings[0]

    @property
    def best(self) -> Timing:
        return min(self.timings, key=lambda timing: timing.microseconds)

    @property
    def ratio(self) -> float:
        """Time of the first choice over that of the best tile; 1 is perfect."""
        return self.first.microseconds / self.best.microseconds

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.case.name, "ratio": round(self.ratio, 4), **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sweep:
        """What :meth:`to_dict` gave, by way of JSON."""
        case: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data["case"].items()}
        pairs = ([(TileConfig(**tile), why) for tile, why in data[key]] for key in ("refused", "wrong"))
        timings = [Timing(TileConfig(**each["tile"]), each["microseconds"], each["how"]) for each in data["timings"]]
        return cls(Case(**case), tuple(timings), *map(tuple, pairs))


def time_tiles(
    case: Case,
    tiles: Sequence[TileConfig],
    device: torch.device | str = "cuda",
    timer: Callable[[Sequence[Run], Sequence[Inputs], int], list[tuple[float, ...]]] = alternating,
    look: Callable[[Run, Inputs], float] = glance,
) -> Sweep:
    """Time tiles of a case: all of them for themselves, then the fastest and the first again in turn.

    Each is compared with fp32 attention before, over memory full of NaN.

    Args:
        timer: ``timer(runs, inputs, rounds)``: the time of each run on one of the inputs, round by round.
        look: the time of one call.
    """
    torch.manual_seed(0)
    copies = copies_of(case)
    inputs = make_inputs(case, device, copies if case.kind == "decode" else min(copies, _PROMPT_COPIES))
    sampled = sample(inputs[0])
    timings: dict[TileConfig, Timing] = {}
    refused: list[tuple[TileConfig, str]] = []
    wrong: list[tuple[TileConfig, str]] = []
    fastest = math.inf
    for tile in tiles:
        run = functools.partial(attend, tile=tile)
        try:
            with poisoned():
                out = run(inputs[0])
            check(inputs[0], out, sampled)
            time, how = look(run, inputs[0]), "once"
            if time <= _SLOW * fastest + _LAUNCHES:
                time, how = statistics.median(time for (time,) in timer([run], inputs, _ROUNDS)), "graph"
        except WrongResultError as error:
            wrong.append((tile, error.cause))
        except Exception as error:
            if cause_of(error) not in ("resources", "build"):
                raise
            refused.append((tile, first_line(error)))
        else:
            timings[tile] = Timing(tile, time, how)
            fastest = min(fastest, time)
    for tile, time in _final(timings, inputs, timer).items():
        timings[tile] = Timing(tile, time, "paired")
    return Sweep(case, tuple(timings.values()), tuple(refused), tuple(wrong))


def _final(timings: dict[TileConfig, Timing], inputs: Sequence[Inputs], timer: Any) -> dict[TileConfig, float]:
    """The first tile's time and those of the fastest, taken in turn."""
    close = sorted(timings.values(), key=lambda timing: timing.microseconds)[:_FINALISTS]
    chosen = [timing.tile for timing in close if timing.microseconds <= _CLOSE * close[0].microseconds]
    tiles = list(dict.fromkeys([*list(timings)[:1], *chosen]))
    rounds = timer([functools.partial(attend, tile=tile) for tile in tiles], inputs, _FINAL_ROUNDS)
    return {tile: statistics.median(times) for tile, times in zip(tiles, zip(*rounds, strict=True), strict=True)}


def geometric_mean(sweeps: Sequence[Sweep]) -> float:
    """Of the ratios: the figure a cost model is held to."""
    return math.exp(sum(math.log(each.ratio) for each in sweeps) / len(sweeps))


def ranked_tiles(case: Case, profile: DeviceProfile) -> list[TileConfig]:
    """The optimizer's tiles for a case, best first, with the number that their keys are cut by."""
    call = meta_call(case)
    ranked = rank_tiles(attention_spec(call), profile).configs
    return list(dict.fromkeys(_settled(tile, call) for tile in ranked))


def tiles_of(case: Case, profile: DeviceProfile) -> list[TileConfig]:
    """The ranked tiles, and each with half and with twice as many cuts; keys of whole prompts stay together."""
    tiles = ranked_tiles(case, profile)
    others = []
    for tile in tiles:
        if tile.parts:
            numbers = (max(2, int(tile.parts) // 2), int(tile.parts) * 2)
            others += [dataclasses.replace(tile, parts=number) for number in numbers]
        elif tile.num_splits != 1 or case.kind == "decode":
            numbers = (max(1, int(tile.num_splits) // 2), int(tile.num_splits) * 2)
            others += [dataclasses.replace(tile, num_splits=number) for number in numbers]
    return list(dict.fromkeys([*tiles, *others]))


def _settled(tile: TileConfig, call: AttentionCall) -> TileConfig:
    """With the numbers of splits and parts that this call gets, of which one counts."""
    if parts := number_of_parts(call, tile):
        return dataclasses.replace(tile, num_splits=1, parts=parts // call.seq_lens.shape[0])
    return dataclasses.replace(tile, num_splits=number_of_splits(call, tile), parts=0)


def meta_call(case: Case) -> AttentionCall:
    """The case's call without data."""
    return AttentionCall.of(**make_inputs(case, "meta", copies=1)[0].arguments)


def entry_of(case: Case) -> Callable[..., Any]:
    """The kernel entry of a case."""
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    return paged_decode if case.q_lens is None else paged_prefill


def attend(inputs: Inputs, tile: TileConfig) -> torch.Tensor:
    """The case's kernel with one tile."""
    return entry_of(inputs.case)(AttentionCall.of(**inputs.arguments), tile, lambda kernel: kernel)[0]
