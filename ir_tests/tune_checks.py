"""Checks of ``tune`` with Triton's interpreter for the kernels and a stopwatch that says what the test wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from subprocess_results import report

from tcport.bench import tune as module
from tcport.bench.cases import Case, parse_case
from tcport.bench.tune import Tuning, tune
from tcport.device import catalogue_profile
from tcport.errors import KernelBuildError
from tcport.kernels.call import AttentionCall
from tcport.lowering.candidate import Candidate
from tcport.lowering.paged_attention import every_tile
from tcport.lowering.spec import attention_spec, opened

CASES = [parse_case("h4-2 d16 b2 c40 fp32"), parse_case("h4-2 d16 b1 c7 fp32")]
TILES = 5
PROFILE = catalogue_profile("h200")


def tiles(cases: Sequence[Case] = CASES) -> list[Candidate]:
    """The first of the model's choices for the cases' shape."""
    (inputs,) = module.make_inputs(cases[0], "cpu", 1)
    spec = opened(attention_spec(AttentionCall.of(**inputs.arguments)))
    return every_tile(spec, PROFILE)[:TILES]


def tuned(
    times: Callable[[int, int], float], change: Callable[[list[Candidate]], list[Candidate]] = list, seconds: float = 99
) -> tuple[list[Candidate], Tuning]:
    """Tune with a stopwatch: ``times(tile, set)`` for a tile by its place; sets of pairs are 1 and 2, else it is 0."""
    links = change(tiles())
    sets = [0]

    def timer(runs: Sequence[Any], inputs: Sequence[Any], rounds: int) -> list[tuple[float, ...]]:
        if len(runs) == 2:
            sets[0] = 1 if runs[0].args[0] == links[0] else 2
        return [tuple(times(links.index(run.args[0]), sets[0]) for run in runs)] * rounds

    ticks = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "every_tile", lambda spec, profile: links)
        found = tune(
            CASES, PROFILE, seconds=seconds, device="cpu", memory=1e6, timer=timer, clock=lambda: float(next(ticks))
        )
    return links, found


def replaced(place: int, run: Callable[..., Any]) -> Callable[[list[Candidate]], list[Candidate]]:
    return lambda links: [dataclasses.replace(x, run=run) if i == place else x for i, x in enumerate(links)]


def the_fastest_right_tile_is_taken() -> None:
    links, found = tuned(lambda tile, set: {2: 80.0, 3: 90.0}.get(tile, 100.0))
    assert (found.model, found.best) == (links[0], links[2])
    assert found.gain == 1.25
    assert (found.tried, found.refused, found.all_tried) == (TILES, (), True)
    entry = found.promoted
    assert entry is not None
    assert entry.is_of(links[2].config)  # type: ignore[arg-type]
    assert entry.cases == ("h4-2 d16 b2 c40 fp32", "h4-2 d16 b1 c7 fp32")
    assert entry.model == str(links[0].uncut.config)
    assert entry.facts["form"] == "decode"
    assert (entry.facts["head_dim_v"], entry.facts["query_dtype"]) == (16, "float32")


def less_than_two_percent_is_not_taken() -> None:
    _, found = tuned(lambda tile, set: 98.1 if tile == 2 else 100.0)
    assert 1.019 < found.gain < 1.02
    assert found.promoted is None


def a_gain_must_show_in_both_sets_of_pairs() -> None:
    """Three percent in the first set, one in the second: the smaller counts."""
    links, found = tuned(lambda tile, set: {0: 95.0, 1: 97.0, 2: 99.0}[set] if tile == 2 else 100.0)
    assert found.best == links[2]
    assert abs(found.gain - 100 / 99) < 1e-9
    assert found.promoted is None


def nothing_faster_leaves_the_model_s_choice() -> None:
    links, found = tuned(lambda tile, set: 100.0 + tile)
    assert (found.best, found.gain, found.promoted) == (links[0], 1.0, None)


def a_fast_tile_with_wrong_numbers_is_refused() -> None:
    """It writes nothing: what it returns is the memory as it was, which is full of NaN."""

    def lazy(call: AttentionCall, launch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(call.query), torch.empty(0)

    links, found = tuned(lambda tile, set: 1.0 if tile == 1 else 100.0, replaced(1, lazy))
    assert [link for link, _ in found.refused] == [links[1]]
    assert "results are off by inf" in found.refused[0][1]
    assert (found.best, found.promoted) == (links[0], None)


def a_tile_that_does_not_fit_is_refused_and_the_next_stands_for_the_model() -> None:
    def too_big(call: AttentionCall, launch: Any) -> None:
        raise RuntimeError("out of resource: shared memory, Required: 300000.")

    links, found = tuned(lambda tile, set: 100.0 - tile, replaced(0, too_big))
    assert found.model == links[1]
    assert "Required: 300000" in found.refused[0][1]
    assert found.tried == TILES - 1


def where_no_tile_works_it_is_said() -> None:
    def broken(call: AttentionCall, launch: Any) -> None:
        raise KernelBuildError("ptxas fatal.", "None.")

    with pytest.raises(KernelBuildError, match="No tile works: ptxas fatal"):
        tuned(lambda tile, set: 1.0, lambda links: [dataclasses.replace(link, run=broken) for link in links])


def the_time_is_kept() -> None:
    """The clock moves on by a second at each look: two seconds are up before the third tile."""
    links, found = tuned(lambda tile, set: 100.0 - tile, seconds=1.5)
    assert found.tried < TILES
    assert not found.all_tried
    assert found.model == links[0]


CHECKS = (
    the_fastest_right_tile_is_taken,
    less_than_two_percent_is_not_taken,
    a_gain_must_show_in_both_sets_of_pairs,
    nothing_faster_leaves_the_model_s_choice,
    a_fast_tile_with_wrong_numbers_is_refused,
    a_tile_that_does_not_fit_is_refused_and_the_next_stands_for_the_model,
    where_no_tile_works_it_is_said,
    the_time_is_kept,
)


def checks() -> dict[str, Callable[[], None]]:
    return {check.__name__.replace("_", " "): check for check in CHECKS}


if __name__ == "__main__":
    report(checks())
