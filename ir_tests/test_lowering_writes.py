"""``check_lowering`` looks at arguments too: what an operator writes is written, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import registered_operators, unregister_lowering
from tcport.testing import check_lowering

X = torch.tensor([1.0, -2.0, 4.0])


@torch.library.custom_op("writes::scale_", mutates_args=("x",))
def scale_(x: Tensor, by: Tensor) -> None:
    x.mul_(by)


@torch.library.custom_op("writes::total", mutates_args=())
def total(parts: list[Tensor], by: float) -> Tensor:
    return torch.stack(parts).sum(0) * by


@total.register_fake
def _(parts: list[Tensor], by: float) -> Tensor:
    return torch.empty_like(parts[0])


@pytest.fixture
def check() -> Iterator[Callable[..., int]]:
    """Registers a kernel of an operator and compares it."""

    def checked(op: str, run: Callable[..., Any], *arguments: Any) -> int:
        offer = Candidate("kernel", "torch", lambda call, launch: run(*call.args))
        tcport.register_lowering(op, name="kernel", inputs=lambda: [arguments])(lambda spec, profile: offer)
        return check_lowering(op, "kernel")

    yield checked
    for op in registered_operators():
        if op.startswith("writes::"):
            unregister_lowering(op, "kernel")


def scale(x: Tensor, by: Tensor) -> None:
    x.copy_(by * x)


def scale_nothing(x: Tensor, by: Tensor) -> None:
    pass


def scale_both(x: Tensor, by: Tensor) -> None:
    x.mul_(by)
    by.mul_(1.0000001)


def add(parts: list[Tensor], by: float) -> Tensor:
    return sum(part * by for part in parts)  # type: ignore[return-value]


def add_into_the_first(parts: list[Tensor], by: float) -> Tensor:
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0] * by


def test_a_kernel_that_writes_what_the_operator_writes_is_right(check: Callable[..., int]) -> None:
    assert check("writes::scale_", scale, X, X.flip(0)) == 1
    assert check("writes::total", add, [X, 2 * X], 0.5) == 1
    assert X.tolist() == [1.0, -2.0, 4.0]  # samples stay as they are


@pytest.mark.parametrize(
    ("op", "run", "arguments", "said"),
    [
        ("writes::scale_", scale_nothing, (X, X.flip(0)), r"what it wrote to x: .*not close"),
        ("writes::scale_", scale_both, (X, torch.full((3,), 3.0)), r"it wrote to by, which the operator does not"),
        ("writes::total", add_into_the_first, ([X, 2 * X], 0.5), r"it wrote to parts, which the operator does not"),
    ],
)
def test_a_kernel_that_writes_something_else_is_found(
    check: Callable[..., int], op: str, run: Callable[..., Any], arguments: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(AssertionError, match=f"(?s)Kernel kernel of {op} .*{said}"):
        check(op, run, *arguments)
