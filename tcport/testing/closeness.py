"""How close two results of attention must be."""

from __future__ import annotations

import torch
from torch import Tensor

_TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (2e-2, 2e-3),
    torch.bfloat16: (2e-2, 2e-3),
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-9, 1e-9),
}

_TOKENS_OF_A_MEAN = 4
"""Numbers of one token share the rounding of its weights, by up to 2**-8 in bf16: the mean of few tokens is none."""


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Greatest and mean absolute error allowed for a result of attention in ``dtype`` over unit-normal inputs."""
    return _TOLERANCES[dtype]


def assert_close(
    actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, what: str = "the result"
) -> None:
    """Fail unless ``actual`` is ``expected`` to the rounding of ``dtype``.

    Infinite and NaN elements must be the same in both, and rows of zeros (tokens that see no key) exactly zero. Errors
    are measured against the greatest expected number when that exceeds 1, and their mean from four tokens (rows of the
    first dimension) on.

    Args:
        actual: what the code under test returned.
        expected: the same from the reference, of any float dtype, on any device.
        dtype: decides the tolerance; None: the dtype of ``actual``.
        what: names the result in the message.

    Raises:
        AssertionError: saying which rule failed, and by how much.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}")
    greatest, mean = tolerance(dtype or actual.dtype)
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    finite = expected.isfinite()
    if not torch.allclose(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True):
        raise AssertionError(f"{what} differs where infinite or NaN numbers are expected")
    if not actual[finite].isfinite().all():
        raise AssertionError(f"{what} has {(~actual[finite].isfinite()).sum()} NaN or infinite numbers that are wrong")
    if not finite.any():
        return
    unit = max(1.0, expected[finite].abs().max().item())
    error = (actual[finite] - expected[finite]).abs() / unit
    tokens = expected.shape[0] if expected.dim() else 1
    if error.max() > greatest or (tokens >= _TOKENS_OF_A_MEAN and error.mean() > mean):
        raise AssertionError(
            f"{what} is off by {error.max():.3g} at most and {error.mean():.3g} on average; "
            f"allowed: {greatest:.3g} and {mean:.3g} (of {unit:.3g})"
        )
    zero_rows = (expected == 0).all(-1) if expected.dim() > 2 else torch.zeros(0, dtype=torch.bool)
    if zero_rows.any() and actual[zero_rows].any():
        raise AssertionError(f"{what} is not exactly 0 where a token sees no key")
