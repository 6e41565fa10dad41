"""The ways to run an operator that must all give the same result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental import _config as symbolic_config

import tcport
from tcport.kernels import decomposition
from tcport.kernels.call import AttentionCall, WriteCall
from tcport.testing import to_device

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Path:
    """One way.

    Attributes:
        attention: takes the arguments of ``tcport.paged_attention`` by name; returns ``(out, lse)``.
        write: takes the arguments of ``tcport.kv_write``.
        compiles: a compiler runs for each new kind of input, so a test should try few of them.
    """

    name: str
    attention: Callable[..., tuple[Tensor, Tensor]]
    write: Callable[..., None]
    compiles: bool = False

    def some(self, inputs: Sequence[T], few: int = 1) -> Sequence[T]:
        """All inputs, or the first few where each of them is compiled."""
        return inputs[:few] if self.compiles else inputs


def _compiled(function: Callable[..., T], equal_sizes_may_part: bool) -> Callable[..., T]:
    """Compiled for open sizes.

    Args:
        equal_sizes_may_part: sizes that are equal in one input need not be in the next, so that few graphs serve many
            inputs. Not for functions that write to two views of one storage: Inductor then generates code with an
            undefined size (``NameError``, torch 2.13).
    """
    run = torch.compile(function, backend="tcport", fullgraph=True, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> T:
        duck = symbolic_config.patch(use_duck_shape=not equal_sizes_may_part)
        with duck, torch._dynamo.config.patch(recompile_limit=64):
            return run(*args, **kwargs)

    return call


def on_gpu(path: Path) -> Path:
    """The same way, on a GPU, for arguments on the CPU."""
    return dataclasses.replace(
        path, name=f"{path.name} on a GPU", attention=_on_gpu(path.attention), write=_on_gpu(path.write)
    )


def _on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same on a GPU, for arguments on the CPU: results come back, and so does what was written to an argument."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        moved = to_device(given, "cuda")
        result = function(*(moved[str(i)] for i in range(len(args))), **{name: moved[name] for name in kwargs})
        if result is not None:
            return tuple(tensor.cpu() for tensor in result)
        for name in ("2", "3"):  # k_cache and v_cache
            given[name].copy_(moved[name])
        return None

    return call


def _attention(**arguments: Any) -> tuple[Tensor, Tensor]:
    return tcport.paged_attention(**arguments, return_lse=True)


def _decomposed_attention(**arguments: Any) -> tuple[Tensor, Tensor]:
    return decomposition.paged_attention(AttentionCall.of(**arguments, return_lse=True))


def _decomposed_write(*args: Any, **options: Any) -> None:
    decomposition.kv_write(WriteCall.of(*args, **options))


PATHS = (
    Path("eager", _attention, tcport.kv_write),
    Path("decomposition", _decomposed_attention, _decomposed_write),
)
"""Ways that cost little for each new kind of input."""

COMPILED = Path("compiled", _compiled(_attention, True), _compiled(tcport.kv_write, False), compiles=True)
"""``torch.compile(backend="tcport")``: whatever the chain chooses for the device, lowered by Inductor."""

GPU_PATHS = tuple(on_gpu(path) for path in (*PATHS, COMPILED))

EVERY_PATH = [
    *(pytest.param(path, id=path.name) for path in PATHS),
    *(pytest.param(path, id=path.name, marks=pytest.mark.gpu) for path in GPU_PATHS),
]
"""Parameters of a fixture: every way but the one that compiles for the CPU."""


def slots_of(table: Tensor, lens: Sequence[int], page: int) -> Tensor:
    """The slot of every position of every sequence, one sequence after the other."""
    return torch.cat(
        [table[b, torch.arange(n) // page].long() * page + torch.arange(n) % page for b, n in enumerate(lens)]
    )
