"""Kernels that fail on demand, put at the head of an operator's chain on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tcport.ir import TileConfig
from tcport.kernels import decomposition
from tcport.kernels.call import AttentionCall, Launcher, WriteCall
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import register_lowering, rows, unregister_lowering

TILES = (TileConfig(64, 64, 4, 3), TileConfig(32, 32, 4, 2), TileConfig(16, 16, 1, 1))


class Faulty:
    """An attention kernel with a tuned tile, another, and a generic one.

    Attributes:
        fault: called with the tile before anything is computed; it raises what the kernel should fail with.
        calls: the tiles that were tried, in order.
    """

    def __init__(self, fault: Callable[[TileConfig], None], name: str = "faulty") -> None:
        self.fault = fault
        self.name = name
        self.calls: list[TileConfig] = []

    def lower(self, spec: Any, profile: Any) -> list[Candidate]:
        tiers = ("tuned", "tuned", "generic")
        return [Candidate(self.name, tier, self._run(t), t) for tier, t in zip(tiers, TILES, strict=True)]

    def _run(self, tile: TileConfig) -> Callable[[AttentionCall, Launcher], Any]:
        def run(call: AttentionCall, launch: Launcher) -> Any:
            self.calls.append(tile)
            self.fault(tile)
            return decomposition.paged_attention(call)

        return run


@contextlib.contextmanager
def installed(kernel: Faulty, priority: int = 1) -> Iterator[Faulty]:
    """The kernel registered for the CPU within a ``with`` block, with plain PyTorch alone behind it."""
    others = [row for row in rows("paged_attention") if row.name == "cpp_attention"]
    for row in others:
        unregister_lowering(row.op, row.name)
    register_lowering("paged_attention", name=kernel.name, vendor="cpu", priority=priority)(kernel.lower)
    try:
        yield kernel
    finally:
        unregister_lowering("paged_attention", kernel.name)
        for row in others:
            register_lowering(row.op, name=row.name, vendor=row.vendor, state=row.state)(row.lower)


class FaultyWrite:
    """A cache write with one tuned kernel; ``fault`` and ``calls`` as in :class:`Faulty`, without tiles."""

    def __init__(self, fault: Callable[[], None], name: str = "faulty_write") -> None:
        self.fault = fault
        self.name = name
        self.calls = 0

    def lower(self, spec: Any, profile: Any) -> Candidate:
        return Candidate(self.name, "tuned", self._run)

    def _run(self, call: WriteCall, launch: Launcher) -> Any:
        self.calls += 1
        self.fault()
        return decomposition.kv_write(call)


@contextlib.contextmanager
def installed_write(kernel: FaultyWrite, priority: int = 9) -> Iterator[FaultyWrite]:
    """The write registered for the CPU, ahead of the others, within a ``with`` block."""
    register_lowering("kv_write", name=kernel.name, vendor="cpu", priority=priority)(kernel.lower)
    try:
        yield kernel
    finally:
        unregister_lowering("kv_write", kernel.name)


def raising(error: BaseException, tiles: tuple[TileConfig, ...] = TILES) -> Callable[[TileConfig], None]:
    """A fault that raises ``error`` for some tiles."""

    def fault(tile: TileConfig) -> None:
        if tile in tiles:
            raise error

    return fault


# An operator that fails when compiled code runs it, as a kernel does whose launch the driver refuses.
_LIBRARY = torch.library.Library("tcport_faults", "FRAGMENT")
_LIBRARY.define("launch(Tensor x, str kernel) -> Tensor")
_LIBRARY.define("work(Tensor x) -> Tensor")
_refused: dict[str, BaseException] = {}


def refuse(kernel: str, error: BaseException | None) -> None:
    """Let the launches of a kernel fail with ``error``, or work again (None)."""
    _refused.pop(kernel, None)
    if error is not None:
        _refused[kernel] = error


def launching(name: str) -> Faulty:
    """A kernel whose launches fail when they are told to; see :func:`refuse`."""
    kernel = Faulty(lambda tile: None, name)

    def lower(spec: Any, profile: Any) -> Candidate:
        def run(call: AttentionCall, launch: Launcher) -> Any:
            out, lse = decomposition.paged_attention(call)
            return torch.ops.tcport_faults.launch(out, name), lse

        return Candidate(name, "tuned", run)

    kernel.lower = lower  # type: ignore[method-assign,assignment]
    return kernel


def _launch(x: torch.Tensor, kernel: str) -> torch.Tensor:
    if kernel in _refused:
        raise _refused[kernel]
    return x.clone()


_LIBRARY.impl("launch", _launch, "CPU")
_LIBRARY.impl("work", lambda x: _launch(x, "work"), "CPU")
torch.library.register_fake("tcport_faults::work", torch.empty_like, lib=_LIBRARY)
torch.library.register_fake("tcport_faults::launch", lambda x, kernel: torch.empty_like(x), lib=_LIBRARY)
