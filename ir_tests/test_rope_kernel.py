"""The Triton kernel of ``rope_and_write``: in the interpreter, compiled for GPUs that are not here, and on one."""

from __future__ import annotations

import dataclasses

import pytest
import rope_kernel_checks
import torch
from kernel_tests import kernel_tests
from torch import Tensor

from tcport.errors import ShapeError
from tcport.kernels.call import WriteCall, share_storage
from tcport.kernels.rope import RopeWriteCall, rotated

interpreted, compiled, test_agrees_with_the_definition, test_compiles = kernel_tests(rope_kernel_checks)


@pytest.mark.parametrize("name", rope_kernel_checks.CASES)
def test_the_operator_agrees_with_the_definition(name: str) -> None:
    rope_kernel_checks.check(rope_kernel_checks.problem(torch.float32, *rope_kernel_checks.CASES[name]), operator)


def operator(call: RopeWriteCall) -> Tensor:
    options = {name: getattr(call, name) for name in ("cos", "sin", "q_weight", "k_weight", "eps", "interleaved")}
    return torch.ops.tcport.rope_and_write(call.query, **vars(call.write), **options)


def test_the_definition_on_numbers_worked_out_by_hand() -> None:
    """A quarter turn takes the pair (1, 2) to (-2, 1); the norm of (3, 4, 0, 0) divides by 2.5."""
    query = torch.tensor([[[1.0, 10.0, 2.0, 20.0]]])
    write = WriteCall(query, query, *torch.zeros(2, 1, 1, 1, 4), torch.tensor([0]))
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    assert rotated(RopeWriteCall(query, write, zero, one))[0].tolist() == [[[-2.0, -20.0, 1.0, 10.0]]]
    pairs = RopeWriteCall(query, write, zero[:, :2], one[:, :2], interleaved=True)
    assert rotated(pairs)[0].tolist() == [[[-10.0, 1.0, -20.0, 2.0]]]
    call = RopeWriteCall(torch.tensor([[[3.0, 4.0, 0.0, 0.0]]]), write, one, zero, one[0] * 5, one[0])
    torch.testing.assert_close(rotated(call)[0], torch.tensor([[[6.0, 8.0, 0.0, 0.0]]]))


def test_rows_of_the_cache_itself_move_to_other_slots() -> None:
    """Each slot gets what its source held before the call, though later sources are slots written earlier."""
    k_cache, v_cache = torch.randn(2, 3, 4, 2, 8).clone().unbind()
    before = k_cache.clone().flatten(0, 1), v_cache.clone().flatten(0, 1)
    rows, slots = slice(0, 4), torch.tensor([1, 2, 3, 4])
    new = k_cache.flatten(0, 1)[rows], v_cache.flatten(0, 1)[rows]
    arguments = (torch.randn(4, 2, 8), *new, torch.ones(4, 8), torch.zeros(4, 8), k_cache, v_cache, slots)
    write = RopeWriteCall.of(*arguments).write  # what every kernel is handed, in whatever order it writes
    assert not any(share_storage(x, y) for x in (write.key, write.value) for y in (k_cache, v_cache))
    torch.ops.tcport.rope_and_write(*arguments)
    for cache, old in zip((k_cache, v_cache), before, strict=True):  # an angle of 0 turns nothing
        assert torch.equal(cache.flatten(0, 1)[1:5], old[rows])
        assert torch.equal(cache.flatten(0, 1)[0], old[0])


def test_tables_of_another_size_are_refused() -> None:
    call = rope_kernel_checks.problem(torch.float32, 64, False, False, False)
    with pytest.raises(ShapeError, match=r"cos is \[5, 32\] for 5 tokens of head dim 64.*\[5, 64\]"):
        torch.ops.tcport.rope_and_write(call.query, cos=call.cos[:, :32], sin=call.sin[:, :32], **vars(call.write))


@pytest.mark.gpu
@pytest.mark.parametrize("name", rope_kernel_checks.CASES)
@pytest.mark.parametrize("dtype", rope_kernel_checks.TOLERANCE)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    from tcport.kernels.triton_rope import rope_and_write

    call = rope_kernel_checks.problem(dtype, *rope_kernel_checks.CASES[name], device="cuda")
    rope_kernel_checks.check(call, lambda call: rope_and_write(call, lambda kernel: kernel))


@pytest.mark.gpu
def test_overlapped_launches_wait_for_what_they_read() -> None:
    """Each call turns the query that the one before left, and moves rows of the cache that it wrote: as if waited for.

    Eagerly and in a graph.
    """
    from tcport.kernels.triton_rope import rope_and_write

    call = rope_kernel_checks.problem(torch.bfloat16, 128, False, True, False, (32, 8), device="cuda")
    caches = call.k_cache, call.v_cache
    before = [cache.clone() for cache in caches]
    # No other kernel stands between two calls: five rows go from the first slots to slots from 8 on, and back.
    rows = [[cache.flatten(0, 1)[first : first + 5] for cache in caches] for first in (0, 8)]
    slots = [torch.arange(5, device="cuda") + first for first in (8, 0)]

    def chained(wait: bool) -> list[Tensor]:
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        query = call.query
        for turn in range(20):
            write = WriteCall(*rows[turn % 2], *caches, slots[turn % 2])
            query = rope_and_write(dataclasses.replace(call, query=query, write=write), lambda kernel: kernel)
            if wait:
                torch.cuda.synchronize()
        return [query, *(cache.clone() for cache in caches)]

    expected = chained(wait=True)
    assert all(each.isfinite().all() for each in expected)
    assert all(map(torch.equal, chained(wait=False), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chained(wait=False)
    for _ in range(3):
        for each in captured:
            each.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, expected))
