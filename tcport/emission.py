"""A node as it was lowered: its chain, the link that was taken, and the kernel launches that link makes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch

from tcport.lowering.candidate import Candidate
from tcport.lowering.operators import NodeChoice


@dataclasses.dataclass
class Emitted:
    """What one node became.

    Attributes:
        launches: name and whole-number arguments (tile constants, warps, stages) of each Triton launch.
    """

    node: str
    choice: NodeChoice
    candidate: Candidate
    launches: list[tuple[str, dict[str, int]]] = dataclasses.field(default_factory=list)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The node's results from its arguments, for tracing."""
        self.launches.clear()
        return self.candidate.run(self.choice.operator.call(*args, **kwargs), self._launcher())

    def made(self, kernel: str, source: str) -> bool:
        """Whether a generated kernel is one of this node's.

        Args:
            kernel: the kernel function's name, perhaps numbered.
            source: the generated code, which spells out constants as ``'BLOCK_N': 64``. A constant that it does not
                name decides nothing.
        """
        return any(
            re.fullmatch(rf"{name}(_\d+)?", kernel) and _agrees(constants, source) for name, constants in self.launches
        )

    def _launcher(self) -> Callable[[Any], Any]:
        if not self.candidate.needs_compiler:
            return torch.library.wrap_triton
        return _NotingLauncher(self.launches)


class _NotingLauncher:
    """``wrap_triton`` that writes down what is launched."""

    traced = True

    def __init__(self, launches: list[tuple[str, dict[str, int]]]) -> None:
        self._launches = launches

    def __call__(self, kernel: Any) -> _NotedKernel:
        return _NotedKernel(kernel, self._launches)


class _NotedKernel:
    """A Triton kernel that writes down how it is launched."""

    def __init__(self, kernel: Any, launches: list[tuple[str, dict[str, int]]]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        wrapped = torch.library.wrap_triton(self._kernel)[grid]

        def launch(*args: Any, **kwargs: Any) -> Any:
            constants = {name: value for name, value in kwargs.items() if type(value) is int}
            function = getattr(self._kernel, "fn", self._kernel)
            self._launches.append((function.__name__, constants))
            return wrapped(*args, **kwargs)

        return launch


def _agrees(constants: dict[str, int], source: str) -> bool:
    for name, value in constants.items():
        named = set(re.findall(rf"'{name}': (\d+)", source))
        if named and str(value) not in named:
            return False
    return True
