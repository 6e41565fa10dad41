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
class Terms:
    """What the options of a compile allow, for a kernel that hands calls on when it runs.

    A launcher carries them (``launch.terms``) to the ``run`` of a candidate that is being traced.

    Attributes:
        kernels: names of the only kernels to try; none: all of them.
        strict: a kernel that fails is an error.
    """

    kernels: tuple[str, ...] = ()
    strict: bool = False

    @staticmethod
    def of(kernel: str | tuple[str, ...] | None, strict: bool) -> Terms:
        """From the options ``kernel`` and ``strict``."""
        return Terms((kernel,) if isinstance(kernel, str) else tuple(kernel or ()), strict)


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
        parts: the kernels it runs one after the other, where it runs several; each fails, and is left, by itself.
        source: identity of the code behind it; the registry fills it in.
        footprint: what its kernels take when compiled, in words, where that was looked at.
        aside: why it is not for a call on real tensors, whose sizes and addresses its spec left open; None: it is.
            An eager call then takes the next link, and nothing has failed; compiled code has the kernel ask by itself.
    """

    kernel: str
    tier: Tier
    run: Callable[..., Any]
    config: TileConfig | CpuTile | None = None
    why: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    loaded: bool = False
    parts: tuple[Part, ...] = ()
    source: str = dataclasses.field(default="", repr=False)
    footprint: str = dataclasses.field(default="", compare=False)
    aside: Callable[[Any], str | None] = dataclasses.field(default=lambda call: None, repr=False, compare=False)

    def misfit(self) -> str | None:
        """Which attribute is not what it has to be, if any: anyone may make a candidate, and a chain relies on each."""
        pairs = isinstance(self.options, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in self.options
        )
        right = {
            "kernel": isinstance(self.kernel, str),
            "run": callable(self.run),
            "why": isinstance(self.why, str),
            "options": pairs,
            "parts": isinstance(self.parts, tuple) and all(isinstance(part, Part) for part in self.parts),
            "footprint": isinstance(self.footprint, str),
            "aside": callable(self.aside),
        }
        return next((f"its {name} is {getattr(self, name)!r}" for name, fits in right.items() if not fits), None)

    def steps(self, whole: Any) -> list[tuple[Candidate, Any]]:
        """The single kernels it runs, in order, each with its part of a call, or of a spec."""
        if not self.parts:
            return [(self, whole)]
        return [(part.candidate, part.of(whole)) for part in self.parts]

    @property
    def kernels(self) -> tuple[Candidate, ...]:
        """The single kernels it runs, in order: its parts, or itself."""
        return tuple(part.candidate for part in self.parts) or (self,)

    @property
    def needs_compiler(self) -> bool:
        """Whether Triton has to work on this machine."""
        return any(kernel.tier in ("tuned", "generic") and not kernel.loaded for kernel in self.kernels)

    @property
    def may_fail(self) -> bool:
        """Whether compiling a graph, or its first launch, may show that a kernel of it cannot be had here."""
        return any(kernel.tier != "torch" and not kernel.loaded for kernel in self.kernels)

    @property
    def plain(self) -> bool:
        """Whether it is PyTorch operations alone, behind which there is nothing."""
        return all(kernel.tier == "torch" for kernel in self.kernels)

    @property
    def uncut(self) -> Candidate:
        """It without numbers of splits and parts, which are no part of what is compiled."""
        if not isinstance(self.config, TileConfig):
            return self
        return dataclasses.replace(self, config=self.config.uncut)

    def __str__(self) -> str:
        return f"{self.kernel} [{self.tier}]" + "".join(
            [f" {self.config}" if self.config else "", *(f" {name}={value}" for name, value in self.options)]
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """One kernel of a candidate that runs several; ``of`` takes its part of the whole's call, or of its spec."""

    candidate: Candidate
    of: Callable[[Any], Any]


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
