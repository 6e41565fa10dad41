"""What layers compute alike of a step is computed once: what is shared, what is left, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport.testing import assert_equivalent, capture, run_pass

PAGES, PAGE, HEADS, DIM = 8, 4, 2, 8
LAYERS = 3


def arguments() -> tuple[Tensor, ...]:
    """Hidden states, positions, block table, and caches of every layer ``[LAYERS, 2, pages, page, heads, dim]``."""
    rng = torch.Generator().manual_seed(0)
    table = torch.tensor([[3, 0], [5, 1], [7, 2]])
    return (
        torch.randn(3, HEADS, DIM, generator=rng),
        torch.tensor([1, 4, 6]),
        table,
        torch.randn(LAYERS, 2, PAGES, PAGE, HEADS, DIM, generator=rng),
    )


def every_layer_for_itself(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> Tensor:
    """Slots, lengths and table are worked out in each layer, as in models whose attention takes positions."""
    for caches in pool:
        page = table.gather(1, (positions // PAGE)[:, None])[:, 0]
        slots = page * PAGE + positions % PAGE
        tcport.kv_write(x * 2, x + 1, caches[0], caches[1], slots)
        x = x + tcport.paged_attention(x, caches[0], caches[1], table.int(), (positions + 1).int())
    return x


def test_layers_share_what_they_compute_alike() -> None:
    graph = capture(every_layer_for_itself, *arguments())
    ours = every_layer_for_itself
    before = operations(graph)
    report = run_pass("share_metadata", graph)
    after = operations(graph)
    # Of each layer: a quotient, a gather and its two views, a product, a remainder, a sum; an int32 table; a sum and
    # its cast to int32. Those of one layer are left.
    assert before["gather"] == LAYERS
    assert {name: after[name] for name in ("gather", "remainder", "div")} == {"gather": 1, "remainder": 1, "div": 1}
    assert report.matches == before.total() - after.total() == (LAYERS - 1) * 10
    assert report.saved_operations == (LAYERS - 1) * 8
    # In the eight that are stored: six of 3 positions and two of int32, of a table of 6 and of 3 lengths.
    assert report.saved_bytes == 2 * (LAYERS - 1) * (6 * 3 * 8 + 6 * 4 + 3 * 4)
    assert_equivalent(ours, *arguments(), matches={"share_metadata": report.matches})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_the_result_and_the_caches_are_those_of_eager(dynamic: bool) -> None:
    ours, theirs = arguments(), arguments()
    actual = torch.compile(every_layer_for_itself, backend="tcport", fullgraph=True, dynamic=dynamic)(*ours)
    torch.testing.assert_close(actual, every_layer_for_itself(*theirs), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[3], theirs[3])


def operations(graph: Any) -> Any:
    """How often each operator is called, by the first word of its name."""
    import collections

    calls = (node for node in graph.graph.nodes if node.op == "call_function")
    return collections.Counter(str(node.target).split(".")[1] if "." in str(node.target) else "" for node in calls)


def other_numbers(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> Tensor:
    return x + (positions + 1)[:, None, None] + (positions + 2)[:, None, None]


def one_and_true(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> Tensor:
    return x + torch.full((3, 1, 1), 1) + torch.full((3, 1, 1), True)


def random_numbers(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> Tensor:
    first, second = (torch.randint(0, 2**40, (3, 1, 1)) for _ in range(2))
    return x + (first == second)


def two_results(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    return positions + 1, positions + 1


def two_results_that_are_views(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    return (table + 1)[0], (table + 1)[1]


def floats(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> Tensor:
    return (x * 2).sum(1) + (x * 2).sum(2, keepdim=True)[:, 0]


@pytest.mark.parametrize(
    "model", [other_numbers, one_and_true, random_numbers, two_results, two_results_that_are_views, floats]
)
def test_what_is_not_the_same_or_has_to_stay_apart_is_left(model: Callable[..., Any]) -> None:
    graph = capture(model, *arguments())
    assert run_pass("share_metadata", graph).matches == 0


def written_twice(x: Tensor, positions: Tensor, table: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Two caches of integers that begin alike and are written to."""
    ints = [torch.zeros(PAGES, PAGE, HEADS, DIM, dtype=torch.int8) for _ in range(4)]
    one = torch.ones((), dtype=torch.float32)
    for number, (keys, values) in enumerate((ints[:2], ints[2:])):
        tcport.kv_write(x + number, x, keys, values, positions, k_scale=one, v_scale=one)
    return ints[0] + 0, ints[2] + 0


def test_memory_that_is_written_to_stays_apart() -> None:
    assert_equivalent(written_twice, *arguments())
    first, second = torch.compile(written_twice, backend="tcport", fullgraph=True)(*arguments())
    assert not torch.equal(first, second)


def test_results_do_not_come_to_share_memory() -> None:
    first, second = torch.compile(two_results, backend="tcport", fullgraph=True)(*arguments())
    first.add_(10)
    assert second.tolist() == [2, 5, 7]
