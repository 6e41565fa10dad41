"""Writes in place within a lowering: to tensors of its own, and to what its operator may write to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport import quarantine
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import register_lowering, unregister_lowering

FRESH: dict[str, Any] = {"force_disable_caches": True}

_LIBRARY = torch.library.Library("tcport_writes", "FRAGMENT")
_LIBRARY.define("scaled(Tensor x, float by) -> Tensor")
_LIBRARY.impl("scaled", lambda x, by: x * by, "CompositeExplicitAutograd")
torch.library.register_fake("tcport_writes::scaled", lambda x, by: torch.empty_like(x), lib=_LIBRARY)
scaled = torch.ops.tcport_writes.scaled.default


def _put(x: Tensor, y: Tensor) -> None:
    x.copy_(y)


def _count(x: Tensor) -> None:
    x.add_(1)


_LIBRARY.define("put(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("put", _put, "CompositeExplicitAutograd")
_LIBRARY.define("count(Tensor(a!) x) -> ()")
_LIBRARY.impl("count", _count, "CompositeExplicitAutograd")
put, count = torch.ops.tcport_writes.put.default, torch.ops.tcport_writes.count.default


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    quarantine.clear()
    yield
    for operator in ("scaled", "put", "count"):
        unregister_lowering(f"tcport_writes::{operator}", "by_hand")
    quarantine.clear()


def lowered(operator: str, run: Callable[..., Any]) -> None:
    candidate = Candidate("by_hand", "torch", lambda call, launch: run(*call.args))
    register_lowering(f"tcport_writes::{operator}", name="by_hand")(lambda spec, profile: candidate)


def kernels() -> list[str]:
    report = tcport.last_report()
    assert report is not None
    assert report.graphs[0].fallbacks == []
    return [node.kernel for node in report.nodes]


def copied(x: Tensor, by: float) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(x)
    return y.mul_(by)


def filled(x: Tensor, by: float) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(x)
    y.add_(1)
    return (y - 1) * by


def turned(x: Tensor, by: float) -> Tensor:
    y = x.clone()
    y.unsqueeze_(0)
    y.t_()
    return y.squeeze_(1) * by


def placed(x: Tensor, by: float) -> Tensor:
    y = torch.zeros(x.shape[0], 2)
    y[:, 0] = x
    y.t()[0].mul_(by)
    y[:, 1].fill_(9.0)
    return y[:, 0].clone()


def by_number(x: Tensor, by: float) -> Tensor:
    y = torch.tensor([1.0] * 20)
    y.mul_(by)
    return x * y[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("run", [copied, filled, turned, placed, by_number])
def test_a_lowering_that_writes_to_its_own_tensors_leaves_the_others_alone(
    run: Callable[[Tensor, float], Tensor], dynamic: bool
) -> None:
    """Inductor made of a copy the tensor that it was copied from, a graph input among them, and wrote there."""
    lowered("scaled", run)
    x = torch.tensor([1.0, 2.0, 3.0])
    compiled = torch.compile(
        lambda x: [scaled(x, 3.0), scaled(x, 2.0), scaled(x + 7, 2.0)],
        backend="tcport",
        fullgraph=True,
        dynamic=dynamic,
        options=FRESH,
    )
    assert [out.tolist() for out in compiled(x)] == [[3.0, 6.0, 9.0], [2.0, 4.0, 6.0], [16.0, 18.0, 20.0]]
    assert x.tolist() == [1.0, 2.0, 3.0]
    assert kernels() == ["by_hand"] * 3


@pytest.mark.parametrize("as_eager", [False, True])
def test_tensors_that_are_filled_at_random_are_each_layers_own(as_eager: bool) -> None:
    """Those of the second layer were written over those of the first, where torch's own generator draws them."""
    lowered("scaled", lambda x, by: torch.empty_like(x).exponential_() * by)
    compiled = torch.compile(
        lambda x: [scaled(x, 1.0), scaled(x, 1.0)],
        backend="tcport",
        fullgraph=True,
        options={**FRESH, "fallback_random": as_eager},
    )
    torch.manual_seed(3)
    first, second = compiled(torch.empty(1000))
    assert (first == second).sum() < 10
    for drawn in (first, second):
        assert drawn.min() >= 0
        assert 0.8 < drawn.mean() < 1.2  # of a deviation of 1 / sqrt(1000)
    if as_eager:
        torch.manual_seed(3)
        torch.testing.assert_close([first, second], [torch.empty(1000).exponential_() for _ in range(2)])
    assert kernels() == ["by_hand"] * 2


def own_tensors(a: Tensor, b: Tensor) -> Any:
    x, y = a * 0, b * 2
    put(x, y)
    count(x)
    count(y)
    put(x[0], y[1])
    return x, y


def inputs(a: Tensor, b: Tensor) -> Any:
    y = b * 2
    put(a, y)
    count(a)
    put(b[0], b[1])
    count(b[1])
    return y, a + b


def views(a: Tensor, b: Tensor) -> Any:
    x = a + 1
    put(x.t(), b.t())
    count(x[1])
    return x


@pytest.mark.parametrize("run", [own_tensors, inputs, views])
def test_writes_that_operators_declare_are_made_and_no_others(run: Callable[[Tensor, Tensor], Any]) -> None:
    lowered("put", _put)
    lowered("count", _count)
    given = torch.randn(4, 6), torch.randn(4, 6)
    mine, theirs = [t.clone() for t in given], [t.clone() for t in given]
    want = run(*mine)
    got = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(*theirs)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=1e-6)
    assert set(kernels()) == {"by_hand"}
