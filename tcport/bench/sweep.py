"""Every legal tile of a case's kernel, timed: how far the optimizer's first choice is from the best there is."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Sequence
from typing import Any

import torch

from tcport.bench.accuracy import check
from tcport.bench.cases import Case, ragged
from tcport.bench.inputs import Inputs, make_inputs
from tcport.bench.timing import microseconds
from tcport.device import device_profile
from tcport.failures import cause_of
from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall
from tcport.lowering.spec import attention_spec
from tcport.tiling import rank_tiles


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The times of one case.

    Attributes:
        timings: tile and microseconds, as the optimizer ranks them; split counts beside the optimizer's own follow.
        refused: tiles that the device would not run, with its words.
    """

    case: Case
    timings: tuple[tuple[TileConfig, float], ...]
    refused: tuple[tuple[TileConfig, str], ...]

    @property
    def first(self) -> tuple[TileConfig, float]:
        return self.timings[0]

    @property
    def best(self) -> tuple[TileConfig, float]:
        return min(self.timings, key=lambda timing: timing[1])

    @property
    def ratio(self) -> float:
        """Time of the first choice over that of the best tile; 1 is perfect."""
        return self.first[1] / self.best[1]

    def to_dict(self) -> dict[str, Any]:
        def rows(pairs: Sequence[tuple[TileConfig, Any]]) -> list[list[Any]]:
            return [[str(config), value] for config, value in pairs]

        return {
            "name": self.case.name,
            "case": dataclasses.asdict(self.case),
            "ratio": self.ratio,
            "timings": rows(self.timings),
            "refused": rows(self.refused),
        }


def sweep(case: Case, jobs: int = 1) -> Sweep:
    """Time every tile of a case on the current CUDA device; ``jobs`` processes compile beforehand.

    Raises:
        WrongResultError: a tile gives wrong numbers.
    """
    inputs = make_inputs(case)
    configs = tiles_of(inputs[0])
    _compile_ahead(case, configs, jobs)
    timings: list[tuple[TileConfig, float]] = []
    refused: list[tuple[TileConfig, str]] = []
    for config in configs:
        try:
            check(inputs[0], attend(inputs[0], config))
        except Exception as error:
            if cause_of(error) != "resources":
                raise
            refused.append((config, str(error).splitlines()[0]))
            continue
        timings.append((config, microseconds(lambda each, config=config: attend(each, config), inputs, replays=5)))
    return Sweep(case, tuple(timings), tuple(refused))


def geometric_mean(sweeps: Sequence[Sweep]) -> float:
    """Of the ratios: the figure a cost model is held to."""
    return math.exp(sum(math.log(each.ratio) for each in sweeps) / len(sweeps))


def tiles_of(inputs: Inputs) -> list[TileConfig]:
    """The ranked tiles, and each that splits its keys also with half and with twice as many splits."""
    spec = attention_spec(AttentionCall.of(**inputs.arguments))
    ranked = rank_tiles(spec, device_profile(inputs.arguments["query"].device)).configs
    sizes = (int(spec.num_seqs), int(spec.num_tokens), int(spec.max_context))
    tiles = [dataclasses.replace(config, num_splits=config.splits(*sizes)) for config in ranked]
    others = [
        dataclasses.replace(tile, num_splits=splits)
        for tile in tiles
        if tile.num_splits != 1
        for splits in (max(1, int(tile.num_splits) // 2), int(tile.num_splits) * 2)
    ]
    return list(dict.fromkeys([*tiles, *others]))


def attend(inputs: Inputs, config: TileConfig) -> torch.Tensor:
    """The case's kernel with one tile."""
    from tcport.kernels.triton_decode import paged_decode
    from tcport.kernels.triton_prefill import paged_prefill

    entry = paged_decode if inputs.case.q_lens is None else paged_prefill
    return entry(AttentionCall.of(**inputs.arguments), config, lambda kernel: kernel)[0]


def _compile_ahead(case: Case, configs: Sequence[TileConfig], jobs: int) -> None:
    """Fill Triton's cache from several processes: compiling is most of a sweep's time."""
    queries = None if case.q_lens is None else (min(64, max(case.q_lens)),) * 2
    small = dataclasses.replace(case, lens=(64, 64), q_lens=queries)
    kinds = {dataclasses.replace(config, num_splits=min(2, int(config.num_splits))) for config in configs}
    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.starmap(_compile_one, [(small, config) for config in sorted(kinds, key=str)], chunksize=1)


def _compile_one(case: Case, config: TileConfig) -> None:
    try:
        attend(make_inputs(case, copies=1)[0], config)
        torch.cuda.synchronize()
    except Exception as error:  # too big a tile is reported where it is timed
        if cause_of(error) != "resources":
            raise


def _cases(kind: Any, batches: Sequence[int], contexts: Sequence[int], **changes: Any) -> list[Case]:
    return [Case(kind, (context,) * batch, **changes) for batch in batches for context in contexts]


SHAPES: tuple[Case, ...] = (
    *_cases("decode", (1, 8, 64), (512, 2048, 8192)),
    *_cases("decode", (1, 4), (32768,)),
    *_cases("decode", (256,), (512, 2048)),
    *_cases("decode", (16,), (4096,), heads=(64, 8)), *_cases("decode", (16,), (4096,), heads=(32, 32)),
    *_cases("decode", (16,), (4096,), heads=(40, 8)), *_cases("decode", (16,), (4096,), heads=(28, 4)),
    *_cases("decode", (2, 32), (4096,), heads=(96, 8)),
    *_cases("decode", (8, 64), (4096,), dims=(64, 64)), *_cases("decode", (8, 64), (4096,), dims=(256, 256)),
    *_cases("decode", (32,), (4096,), dims=(96, 96)),
    *_cases("decode", (8, 64), (4096,), page=128), *_cases("decode", (64,), (4096,), page=256),
    *_cases("decode", (8, 64), (8192,), kv_dtype="float8_e4m3fn"),
    *(Case("decode", ragged(n, 32, 16384), label=f"ragged {n}, 32 to 16384") for n in (4, 16, 64)),
    *(Case("decode", (4096,) * n, (q,) * n, label=f"b{n} c4096 q{q}") for n, q in ((1, 4), (16, 4), (64, 2), (64, 8))),
    *(Case("prefill", (n,) * b, (n,) * b) for b, n in ((1, 512), (1, 2048), (1, 4096), (4, 1024), (8, 2048))),
    *(Case("prefill", (n,), (n,), dims=(d, d)) for n, d in ((4096, 64), (2048, 256))),
    *(Case("prefill", (context,), (512,)) for context in (4096, 16384)),
    Case("mixed", (4096,) * 32 + (4096,), (1,) * 32 + (1024,), label="32 decodes at 4096, chunk 1024 on 4096"),
    Case("mixed", (1024,) * 8 + (512,), (1,) * 8 + (512,), label="8 decodes at 1024, prompt 512"),
)  # fmt: skip
"""What the cost model is held to: decode, ragged, verify, prefill and mixed."""
