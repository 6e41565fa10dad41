"""Constants that a pattern computes from its numbers: compared as they are with the numbers of each match."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tcport.errors import PatternError
from tcport.pattern import Pattern, number, tensor
from tcport.testing import assert_graph, capture, run_pass

X = torch.linspace(-3, 3, 24).view(4, 6)


def capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def capped_by_product(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x * (1 / cap)) * cap


def as_hypot(x: Tensor, cap: float) -> Tensor:
    """Stands for a fused kernel: an operation that appears nowhere else, and shows the number that it was given."""
    return torch.hypot(x, x * cap)


CAPPED = Pattern((capped, capped_by_product), as_hypot, x=tensor("... d"), cap=number())


@pytest.mark.parametrize(
    ("fn", "cap"),
    [
        (lambda x: torch.tanh(x / 30.0) * 30.0, 30.0),
        (lambda x: torch.tanh(x * (1 / 30.0)) * 30.0, 30.0),
        (lambda x: 0.25 * torch.tanh(4.0 * x), 0.25),
    ],
)
def test_each_spelling_is_found_and_binds_the_number(fn: object, cap: float) -> None:
    graph = capture(fn, X)  # type: ignore[arg-type]
    assert run_pass(CAPPED.rewrite, graph).matches == 1
    assert_graph(graph, f"CHECK: aten.mul.Tensor](args = (%arg0_1, {cap})\nCHECK: aten.hypot\nCHECK-NOT: aten.tanh")


def test_another_constant_is_left_with_the_reason() -> None:
    report = run_pass(CAPPED.rewrite, capture(lambda x: torch.tanh(x * 0.25) * 5.0, X))
    assert report.matches == 0
    assert "capped_by_product: mul has other=0.25, not 0.2" in report.notes[0]


@pytest.mark.parametrize("spelling", [lambda x, cap: torch.tanh(x * (1 / cap)), lambda x, cap: torch.tanh(x)])
def test_a_number_that_stands_nowhere_is_an_error(spelling: object) -> None:
    pattern = Pattern(spelling, as_hypot, x=tensor("... d"), cap=number())  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="has no constant that is cap. Let cap stand in it as it is, too"):
        run_pass(pattern.rewrite, capture(torch.tanh, X))
