"""What the tests of remembered eager calls share: an empty memory, a count of choices, and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport import chain, quarantine
from tcport.kernels import reference


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    quarantine.clear()  # under another quarantine nothing that was kept holds
    yield
    quarantine.clear()


@pytest.fixture(name="chosen")
def counted_choices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that kernels were chosen for, call by call: a remembered call adds none."""
    seen: list[str] = []
    choose = chain.chosen

    def counting(operator: Any, call: Any, **options: Any) -> Any:
        seen.append(operator.name)
        return choose(operator, call, **options)

    monkeypatch.setattr(chain, "chosen", counting)
    return seen


def want(args: tuple[Tensor, ...], num_splits: int = 1, batch_invariant: bool = False, **options: Any) -> Tensor:
    """By the reference, which has no use for what changes no result."""
    return reference.paged_attention(*args, compute_dtype=torch.float64, **options)[0]


def check(args: tuple[Tensor, ...], **options: Any) -> None:
    out = tcport.paged_attention(*args, **options)
    torch.testing.assert_close(out.double(), want(args, **options).double(), rtol=1e-5, atol=1e-5)
