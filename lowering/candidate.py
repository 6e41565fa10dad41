"""What a lowering gives back: a kernel to try, or the reason there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from tcport.ir import TileConfig
from tcport.tiling.cpu import CpuTile

Tier = Literal["tuned", "generic", "blob", "torch"]
"""Links of the chain, best first: tuned Triton, generic Triton, precompiled blob, plain PyTorch."""

TIERS: tuple[Tier, ...] = ("tuned", "generic", "blob", "torch")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a lowering takes a node, and why not when it does not."""

    ok: bool
    reason: str = ""

    @staticmethod
    def no(reason: str) -> Verdict:
        return Verdict(False, reason)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to carry out a node.

    Attributes:
        kernel: name of the kernel, as ``options={"kernel": ...}`` spells it.
        tier: its link of the chain.
        run: ``run(call, launch)`` allocates the outputs and launches; it can be run on tensors or traced.
        config: its tile, None where the kernel has no tiles.
        why: one line on why this tile was chosen.
        options: compile options of the vendor's own that ``run`` launches with.
        loaded: whether its machine code is in the process already, so that it cannot fail to build or to start.
        source: identity of the code behind it; the registry fills it in.
    """

    kernel: str
    tier: Tier
    run: Callable[..., Any]
    config: TileConfig | CpuTile | None = None
    why: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    loaded: bool = False
    source: str = dataclasses.field(default="", repr=False)

    @property
    def needs_compiler(self) -> bool:
        """Whether Triton has to work on this machine."""
        return self.tier in ("tuned", "generic") and not self.loaded

    @property
    def may_fail(self) -> bool:
        """Whether compiling a graph, or its first launch, may show that this kernel cannot be had here."""
        return self.tier != "torch" and not self.loaded

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the kernels it runs one after the other, which ``kernel`` joins by ``+``."""
        return tuple(self.kernel.split("+"))

    def __str__(self) -> str:
        return f"{self.kernel} [{self.tier}]" + "".join(
            [f" {self.config}" if self.config else "", *(f" {name}={value}" for name, value in self.options)]
        )


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A kernel that was considered and left, with the reason."""

    kernel: str
    reason: str
    config: TileConfig | None = None

    def __str__(self) -> str:
        return f"{self.kernel}{f' {self.config}' if self.config else ''}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chain of one node: candidates in the order they will be tried, and what was rejected."""

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...] = ()
