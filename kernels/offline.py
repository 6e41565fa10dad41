"""Compiling what a kernel entry would launch, for a device that is not in the room.

    target = GPUTarget("hip", "gfx942", 64)
    with targeting(target):
        launches = record(paged_decode, call, config)          # call may hold meta or fake tensors
    compiled = compile_launch(launches[0], target)
    compiled.metadata.shared                                   # bytes; Triton itself checks no device limit here

A compile for the wrong target can abort the process, so do it in a subprocess. Triton allows no offline compile in a
process that runs its interpreter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tcport.kernels.target import targeting

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "u1",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch, recorded instead of done."""

    kernel: Any
    grid: tuple[Any, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


def record(entry: Callable[..., Any], *args: Any, traced: bool = False, **kwargs: Any) -> list[Launch]:
    """The launches of a kernel entry: ``entry(*args, launch=..., **kwargs)`` is run with nothing launched.

    Args:
        traced: as a graph has them that is being traced, not as eager code does.
    """
    launches: list[Launch] = []
    as_in_graphs = traced

    class Recorded:
        traced = as_in_graphs

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
            def run(**arguments: Any) -> None:
                names = set(self.kernel.arg_names)
                options = {name: value for name, value in arguments.items() if name not in names}
                taken = {name: arguments[name] for name in self.kernel.arg_names}
                launches.append(Launch(self.kernel, grid, taken, options))

            return run

    entry(*args, launch=Recorded, **kwargs)
    return launches


@dataclasses.dataclass(frozen=True)
class Specialisation:
    """What of a launch is compiled in.

    Attributes:
        signature: type of each parameter; ``"constexpr"`` for one whose value is compiled in.
        constants: those values, by name.
        aligned: parameters that are known to be multiples of 16.
    """

    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]


def specialise(launch: Launch, *, aligned: bool = True) -> Specialisation:
    """A launch specialised as Triton's JIT would: alignment by 16 and ints equal to 1 are known.

    Args:
        aligned: False: nothing is assumed to be aligned, so the kernel takes what an aligned one does not.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    multiples: list[str] = []
    for param in launch.kernel.params:
        value = launch.arguments[param.name]
        fixed = param.is_constexpr or value is None or (type(value) is int and value == 1)
        if fixed and not (param.do_not_specialize and value is not None):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = type_of(value)
        multiple = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and multiple and not (param.do_not_specialize or param.do_not_specialize_on_alignment):
            multiples.append(param.name)
    return Specialisation(signature, constants, tuple(multiples))


def compile_launch(launch: Launch, target: GPUTarget, known: Specialisation | None = None) -> Any:
    """Triton's compiled kernel of a launch; ``known`` is what may be assumed of it, default all that holds."""
    known = known or specialise(launch)
    index = {param.name: number for number, param in enumerate(launch.kernel.params)}
    constants = {(index[name],): value for name, value in known.constants.items()}
    attributes = {(index[name],): [["tt.divisibility", 16]] for name in known.aligned}
    source = _source(launch.kernel)(launch.kernel, known.signature, constants, attributes)
    with targeting(target):
        return triton.compile(source, target=target, options=dict(launch.options))


def compile_ahead(launch: Launch, target: GPUTarget) -> Any:
    """Triton's compiled kernel of a launch, left in its cache where the JIT of a process that has the GPU finds it.

    By way of the JIT itself: what it takes for a constant is part of the name under which it looks.
    """
    with targeting(target):
        return launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)


def _source(kernel: Any) -> type[ASTSource]:
    """The front end that a kernel is written for: Triton's, or Gluon's."""
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def type_of(value: Any) -> str:
    """Triton's name of an argument's type."""
    if hasattr(value, "block_shape"):  # a TMA descriptor
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
