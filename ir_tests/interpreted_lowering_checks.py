"""Checks of a lowering whose Triton kernels are interpreted; ``test_lowerings_elsewhere.py`` runs them in a process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from subprocess_results import report
from torch import Tensor

import tcport
from tcport.device import DeviceProfile
from tcport.device.catalog import catalogue_profile
from tcport.lowering.candidate import Candidate
from tcport.testing import check_lowering

OP = "elsewhere::plus"


@torch.library.custom_op(OP, mutates_args=())
def plus(x: Tensor, y: float) -> Tensor:
    return x + y


@plus.register_fake
def _(x: Tensor, y: float) -> Tensor:
    return torch.empty_like(x)


@triton.jit
def plus_kernel(x, out, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) + y, mask=at < count)


def launched(call: Any, launch: Any, off: float) -> Tensor:
    x, y = call.args
    out = torch.empty_like(x)
    launch(plus_kernel)[(triton.cdiv(x.numel(), 64),)](x, out, y + off, x.numel(), BLOCK=64)
    return out


def samples() -> Iterator[tuple[Any, ...]]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield torch.linspace(-1, 1, 100, dtype=dtype), 0.5


def right(spec: Any, profile: DeviceProfile) -> list[Candidate]:
    return [Candidate("right", tier, lambda call, launch: launched(call, launch, 0.0)) for tier in ("tuned", "generic")]


def wrong(spec: Any, profile: DeviceProfile) -> Candidate:
    return Candidate("wrong", "tuned", lambda call, launch: launched(call, launch, 1.0))


@contextlib.contextmanager
def registered() -> Iterator[None]:
    for lower in (right, wrong):
        tcport.register_lowering(OP, vendor="amd", inputs=samples)(lower)
    try:
        yield
    finally:
        for lower in (right, wrong):
            tcport.unregister_lowering(OP, lower.__name__)


def it_is_compared_for_a_device_that_takes_it() -> None:
    assert check_lowering(OP, "right", profile=catalogue_profile("mi300x")) == 4  # fp32 and fp16, two candidates
    assert check_lowering(OP, "right", profile=catalogue_profile("h200")) == 0
    assert check_lowering(OP, "right") == 0


def wrong_numbers_are_found() -> None:
    with pytest.raises(AssertionError, match=r"(?s)Kernel wrong of elsewhere::plus .*not close"):
        check_lowering(OP, "wrong", profile=catalogue_profile("mi300x"))


def interpreted() -> dict[str, Callable[[], None]]:
    return {f.__name__: f for f in (it_is_compared_for_a_device_that_takes_it, wrong_numbers_are_found)}


if __name__ == "__main__":
    with registered():
        report(interpreted())
