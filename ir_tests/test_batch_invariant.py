"""``batch_invariant=True``: what a sequence gets does not depend, to the bit, on who else is in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_paths import COMPILED, PATHS, Path, on_gpu
from torch import Tensor

import tcport
from tcport.device import device_profile
from tcport.lowering.operators import PAGED_ATTENTION
from tcport.lowering.registry import select
from tcport.testing import Recipe, build_batch

LENS = (9, 700, 33, 0, 300, 1)
Q_LENS = (3, 200, 1, 2, 300, 1)


def cpp_attention(**arguments: Any) -> tuple[Tensor, Tensor]:
    call = PAGED_ATTENTION.call(**arguments, return_lse=True)
    spec = PAGED_ATTENTION.spec(call)
    (candidate,) = select("paged_attention", spec, device_profile("cpu"), kernel="cpp_attention").candidates
    return candidate.run(call, lambda kernel: kernel)


def attention(**arguments: Any) -> tuple[Tensor, Tensor]:
    return tcport.paged_attention(**arguments, return_lse=True)


FORCED = torch.compile(
    attention, backend="tcport", fullgraph=True, dynamic=True, options={"kernel": "torch_attention", "strict": True}
)
EAGER = PATHS[0]
LAST_LINK = Path("last link", FORCED, EAGER.write, compiles=True)
# Not the decomposition: it is what makes no such promise.
CPU_PATHS = (EAGER, Path("C++", cpp_attention, EAGER.write), COMPILED, LAST_LINK)
GPU_PATHS = (on_gpu(EAGER), on_gpu(COMPILED), on_gpu(LAST_LINK))
ALL_PATHS = [
    *(pytest.param(path, id=path.name) for path in CPU_PATHS),
    *(pytest.param(path, id=path.name, marks=pytest.mark.gpu) for path in GPU_PATHS),
]


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("q_lens", [None, Q_LENS], ids=["decode", "varlen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_gets_the_same_bits_in_every_batch(
    path: Path, q_lens: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    recipe = Recipe(lens=LENS, q_lens=q_lens, heads=(6, 2), query_dtype=dtype, sinks=True, batch_invariant=True)
    batch = build_batch(recipe)
    out, lse = path.attention(**batch.arguments)
    batch.check(out, lse)
    for chosen in path.some([(1,), (0, 4), (5, 4, 3, 2, 1, 0), (1, 1, 1, 0)], few=2):
        rows, arguments = gathered(recipe, batch.arguments, chosen)
        out_again, lse_again = path.attention(**arguments)
        assert torch.equal(out_again, out[rows])
        assert torch.equal(lse_again, lse[rows])


def gathered(recipe: Recipe, arguments: dict[str, Any], chosen: tuple[int, ...]) -> tuple[Tensor, dict[str, Any]]:
    """The batch of some of the sequences, and which rows of the first batch are its rows."""
    bounds = list(itertools.pairwise(recipe.query_bounds))
    rows = torch.tensor(list(_rows(bounds, chosen)))
    several = torch.tensor(chosen)
    pages = max(1, max(-(-recipe.lens[sequence] // recipe.page) for sequence in chosen))
    starts = [0, *itertools.accumulate(bounds[sequence][1] - bounds[sequence][0] for sequence in chosen)]
    changed = {
        "query": arguments["query"][rows],
        "block_table": arguments["block_table"][several, :pages],
        "seq_lens": arguments["seq_lens"][several],
    }
    if recipe.q_lens is not None:
        changed["cu_seqlens_q"] = torch.tensor(starts, dtype=arguments["cu_seqlens_q"].dtype)
    return rows, {**arguments, **changed}


def _rows(bounds: list[tuple[int, int]], chosen: tuple[int, ...]) -> Iterator[int]:
    for sequence in chosen:
        yield from range(*bounds[sequence])
