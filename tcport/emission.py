"""A node as it was lowered: its chain, the link that was taken, and the kernel launches that link makes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from tcport._inductor.blame import noting_calls
from tcport.lowering.candidate import Candidate, Terms
from tcport.lowering.operators import NodeChoice
from tcport.lowering.results import check_call_results

Note = Callable[[str, dict[str, int]], None]
"""Is told the function's name and the whole-number arguments of a launch."""


@dataclasses.dataclass
class Emitted:
    """What one node became.

    Attributes:
        launches: of each Triton launch: the kernel of the candidate that makes it, the function's name, and the
            whole-number arguments (tile constants, warps, stages).
        calls: of each operator that is called as it is, opaque to the compiler: the kernel of the candidate that calls
            it, the operator's name, and its strings and floats as code spells them.
        running: the kernel that was traced last.
        terms: what holds for a call that a kernel hands on when it runs.
    """

    node: str
    choice: NodeChoice
    candidate: Candidate
    launches: list[tuple[Candidate, str, dict[str, int]]] = dataclasses.field(default_factory=list)
    calls: list[tuple[Candidate, str, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    running: Candidate | None = None
    terms: Terms = dataclasses.field(default_factory=Terms)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The node's results from its arguments, for tracing."""
        self.launches.clear()
        self.calls.clear()
        results = None
        for kernel, call in self.candidate.steps(self.choice.operator.call(*args, **kwargs)):
            self.running = kernel
            with noting_calls(functools.partial(self._note_call, kernel)):
                results = kernel.run(call, self._launcher(kernel))
            check_call_results(kernel, call, results)
        return results

    def makers(self, kernel: str, source: str) -> list[Candidate]:
        """Which kernels of this node's a generated kernel is.

        Args:
            kernel: the kernel function's name, perhaps numbered.
            source: the generated code, which spells out constants as ``'BLOCK_N': 64``. A constant that it does not
                name decides nothing.
        """
        makers = [
            maker
            for maker, name, constants in self.launches
            if re.fullmatch(rf"{name}(_\d+)?", kernel) and _agrees(constants, source)
        ]
        return list(dict.fromkeys(makers))

    def callers(self, line: str, *, exactly: bool) -> list[Candidate]:
        """Which kernels of this node's a line of generated code belongs to, that calls an operator.

        Args:
            exactly: with the very strings and floats of the line, which tell nodes apart that call one operator.
        """
        callers = [
            caller
            for caller, name, literals in self.calls
            if f"torch.ops.{name}(" in line and (not exactly or all(literal in line for literal in literals))
        ]
        return list(dict.fromkeys(callers))

    def _note_call(self, kernel: Candidate, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append((kernel, name, tuple(repr(value) for value in arguments if type(value) in (str, float))))

    def _launcher(self, kernel: Candidate) -> Callable[[Any], Any]:
        if not kernel.needs_compiler:
            return torch.library.wrap_triton
        return _NotingLauncher(lambda name, constants: self.launches.append((kernel, name, constants)), self.terms)


class _NotingLauncher:
    """``wrap_triton`` that writes down what is launched."""

    traced = True

    def __init__(self, note: Note, terms: Terms) -> None:
        self._note = note
        self.terms = terms

    def __call__(self, kernel: Any) -> _NotedKernel:
        return _NotedKernel(kernel, self._note)


class _NotedKernel:
    """A Triton kernel that writes down how it is launched."""

    def __init__(self, kernel: Any, note: Note) -> None:
        self._kernel = kernel
        self._note = note

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        wrapped = torch.library.wrap_triton(self._kernel)[grid]

        def launch(*args: Any, **kwargs: Any) -> Any:
            constants = {name: value for name, value in kwargs.items() if type(value) is int}
            function = getattr(self._kernel, "fn", self._kernel)
            self._note(function.__name__, constants)
            return wrapped(*args, **kwargs)

        return launch


def _agrees(constants: dict[str, int], source: str) -> bool:
    for name, value in constants.items():
        named = set(re.findall(rf"'{name}': (\d+)", source))
        if named and str(value) not in named:
            return False
    return True
