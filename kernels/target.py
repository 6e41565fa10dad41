"""The GPU that launches are made for: the one their tensors lie on, or one named for a compile without it.

What a kernel must know of its target is decided on the host and passed in. Asked for inside a kernel
(``tl.target_info``), it starts CUDA, which a forked compile worker of Inductor's cannot.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget

_named: contextvars.ContextVar[GPUTarget | None] = contextvars.ContextVar("tcport_target", default=None)


@contextlib.contextmanager
def targeting(target: GPUTarget) -> Iterator[None]:
    """Make launches for ``target``, and let Triton compile as if it were this machine's GPU."""
    triton.runtime.driver.set_active(_AbsentDevice(target))  # type: ignore[arg-type]
    token = _named.set(target)
    try:
        yield
    finally:
        _named.reset(token)
        triton.runtime.driver.set_active(None)  # type: ignore[arg-type]  # found again when it is next asked for


def converts_e4m3(device: torch.device) -> bool:
    """Whether the GPU converts float8_e4m3fn in hardware: NVIDIA from compute capability 8.9 on (PTX ISA, ``cvt``)."""
    return _capability(device) >= (8, 9)


def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one it waits for has ended: NVIDIA from compute capability 9.0 on."""
    return _capability(device) >= (9, 0)


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the NVIDIA GPU that launches are made for; (0, 0) where it is none."""
    target = _named.get()
    if target is not None:
        return divmod(int(target.arch), 10) if target.backend == "cuda" else (0, 0)
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


class _AbsentDevice:
    """The answers that a compile wants from Triton's driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: target  # the JIT keeps the target by device: another one is another device
        self.get_current_stream = lambda device: 0
