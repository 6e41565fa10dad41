"""Fake tensors with the sizes that a graph is being compiled for."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily


def concrete(value: Any) -> Any:
    """A fake tensor of the sizes that the graph is being compiled for, so that a message can name numbers.

    Sizes without such a number (unbacked symbols) leave the tensor as it is, and so is anything but a tensor.
    """
    if not isinstance(value, torch.Tensor):
        return value
    hints = [_hint(size) for size in (*value.shape, *value.stride())]
    numbers = [hint for hint in hints if hint is not None]
    if len(numbers) < len(hints):
        return value
    with unset_fake_temporarily(), FakeTensorMode():
        return torch.empty_strided(
            numbers[: value.dim()], numbers[value.dim() :], dtype=value.dtype, device=value.device
        )


def _hint(size: int | torch.SymInt) -> int | None:
    return size.node.hint if isinstance(size, torch.SymInt) else size
