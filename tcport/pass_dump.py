"""Graphs as readable Python, one numbered file before and one after each pass."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Literal

import torch.fx

from tcport.errors import ArgumentError

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Dump:
    """Where graphs are written to; nowhere when ``folder`` is None."""

    folder: Path | None

    @staticmethod
    def from_environment(value: str | None) -> Dump:
        """The dump that the variable ``TCPORT_DUMP`` asks for; its folder is made.

        Raises:
            ArgumentError: the folder cannot be made or written to.
        """
        if not value:
            return Dump(None)
        folder = Path(value)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"TCPORT_DUMP={value} cannot be used: {error}.", "Name a folder that can be written."
            ) from error
        return Dump(folder)

    def write(self, graph: torch.fx.Graph, name: str, when: Literal["before", "after"]) -> None:
        """Write the graph to ``<number>-<pass>-<when>-<pid>.py``, types and shapes in comments."""
        if self.folder is None:
            return
        owner = graph.owning_module
        code = graph.python_code("self", verbose=True, include_stride=True).src if owner is None else _readable(owner)
        path = self.folder / f"{next(_numbers):04}-{name}-{when}-{os.getpid()}.py"
        path.write_text(code, encoding="utf-8")


def _readable(module: torch.nn.Module) -> str:
    if isinstance(module, torch.fx.GraphModule):
        return module.print_readable(print_output=False, include_stride=True, include_device=True)
    return str(module)
