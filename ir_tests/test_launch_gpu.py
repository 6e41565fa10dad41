"""Direct launches on a CUDA GPU: the results of calls that go by them, and who sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_cases import Case, build, expected
from torch import Tensor

from tcport import ops
from tcport._inductor import launch
from tcport.kernels.call import AttentionCall

pytestmark = pytest.mark.gpu


def attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Any:
    return ops.paged_attention(query * 1.0, k_cache, v_cache, table, lens)


def problem(lens: tuple[int, ...], seed: int = 0) -> tuple[AttentionCall, list[Tensor]]:
    call = build(Case(lens, heads=(8, 2), dtype=torch.float16, seed=seed), "cuda")
    return call, [call.query, call.k_cache, call.v_cache, call.block_table, call.seq_lens]


def right(out: Tensor, call: AttentionCall) -> None:
    torch.testing.assert_close(out.double().cpu(), expected(call)[0], rtol=5e-3, atol=5e-3)


@pytest.fixture
def compiled() -> Callable[..., Tensor]:
    torch.compiler.reset()
    launch._prepared_kernels.clear()
    return torch.compile(attend, backend="tcport", dynamic=True, options={"force_disable_caches": True})


def direct() -> int:
    return sum(launch.KERNEL in getattr(kernel.run, "__globals__", {}) for kernel in launch._prepared_kernels)


def test_calls_of_all_sizes_are_right_the_first_time_and_later(compiled: Callable[..., Tensor]) -> None:
    with torch.no_grad():
        for lens in ((700, 33, 300), (16, 1000, 512, 100, 5), (2000, 64, 700)):
            call, args = problem(lens)
            for _ in range(3):
                right(compiled(*args), call)
    assert direct() >= 1


def test_a_profiler_and_a_graph_see_them(compiled: Callable[..., Tensor]) -> None:
    call, args = problem((700, 33, 300))
    with torch.no_grad():
        for _ in range(3):
            compiled(*args)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            right(compiled(*args), call)
        assert any("paged_attention_kernel" in event.name for event in profile.events() or ())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(*args)
        other, new = problem((697, 40, 299), seed=1)
        assert [value.shape for value in new] == [kept.shape for kept in args]
        for kept, value in zip(args, new, strict=True):
            kept.copy_(value)
        graph.replay()
        right(out, other)
