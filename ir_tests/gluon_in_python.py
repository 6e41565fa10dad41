"""Device code in Gluon as plain Python: its functions over torch tensors, its inline PTX over threads of four warps."""

from __future__ import annotations

import itertools
import operator
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import constexpr

THREADS = torch.arange(128)


class Value(Tensor):
    """A tensor as device code has it: of some layout, and never changed in place."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)  # type: ignore[return-value]

    def __iadd__(self, other: Any) -> Any:
        return self + other


class Pointer:
    """An address in ``memory``, or many."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


def value(number: Any) -> Value:
    return torch.as_tensor(number).as_subclass(Value)


def in_python(*modules: types.ModuleType) -> types.SimpleNamespace:
    """The modules' functions, which call each other and :data:`_GLUON` instead of Gluon."""
    names: dict[str, Any] = {"gl": _GLUON}
    for name, held in itertools.chain(*(vars(module).items() for module in modules)):
        if isinstance(held, constexpr):
            names[name] = held.value
        elif isinstance(getattr(held, "fn", None), types.FunctionType):
            names[name] = types.FunctionType(held.fn.__code__, names)
    return types.SimpleNamespace(**names)


def _load(pointer: Pointer, mask: Any, other: int) -> Value:
    """What is masked may lie anywhere; what is not has to be inside."""
    offset, read = torch.broadcast_tensors(value(pointer.offset), value(mask))
    assert bool(((offset >= 0) & (offset < pointer.memory.numel()))[read].all())
    return torch.where(read, pointer.memory[torch.where(read, offset, 0)], other)  # type: ignore[return-value]


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).to(torch.float32)


def _inline_asm(asm: str, constraints: str, args: Sequence[Tensor], dtype: Any, is_pure: bool, pack: int) -> Value:
    """Elements ``[64, 2 * pack]`` lie among threads as the PTX ISA has those of a wgmma's result (m64nNk16)."""
    element = torch.arange(pack)
    row = (16 * (THREADS // 32) + THREADS % 32 // 4)[:, None] + 8 * (element // 2 % 2)
    column = 8 * (element // 4) + 2 * (THREADS % 4)[:, None] + element % 2
    kinds = ["f" if arg.dtype == torch.float32 else "r" for arg in args]
    assert constraints == ",".join(["=f"] * pack + [kind for kind in kinds for _ in range(pack)])
    given = [arg.expand(64, 2 * pack)[row, column].as_subclass(Tensor) for arg in args]
    registers = {
        f"${pack * (at + 1) + i}": held[:, i] for at, held in enumerate(given) for i in range(pack)
    }  # those of the result come first
    _run(asm, registers)
    result = torch.full((64, 2 * pack), torch.nan)
    result[row, column] = torch.stack([registers[f"${i}"] for i in range(pack)], 1)
    return value(result)


def _run(asm: str, registers: dict[str, Tensor]) -> None:
    """Run PTX on 128 threads; a warp that branches does nothing up to the label."""
    running, label = torch.ones(128, dtype=torch.bool), ""
    registers["%laneid"] = THREADS % 32
    for line in re.split(r"[;\n]", re.sub(r"\.reg [^;]*;|[{}]", "", asm)):
        words = re.split(r"[\s,]+", line.strip())
        if words == [""]:
            continue
        if words[0] == f"{label}:":
            running = torch.ones(128, dtype=torch.bool)
        elif words[1] == "bra.uni":
            assert words[0].startswith("@!")
            taken, label = ~registers[words[0][2:]], words[2]
            assert all(len(set(warp)) == 1 for warp in taken.view(4, 32).tolist())
            running = ~taken
        else:
            target, *sources = words[1:]
            done = _OPERATIONS[words[0]](*(_read(source, registers) for source in sources))
            registers[target] = torch.where(running, done, registers[target]) if target in registers else done


def _read(text: str, registers: dict[str, Tensor]) -> Tensor:
    if text in registers:
        return registers[text]
    if text.startswith("0f"):
        return torch.tensor(int(text[2:], 16)).to(torch.uint32).view(torch.float32).expand(128)
    return torch.tensor(int(text, 0)).expand(128)


def _any_of_warp(p: Tensor, members: Tensor) -> Tensor:
    assert bool((members == 0xFFFFFFFF).all())
    return p.view(4, 32).any(1).repeat_interleave(32)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.f32": lambda a: a,
    "mov.u32": lambda a: a,
    "and.b32": operator.and_,
    "shl.b32": operator.lshift,
    "sub.s32": operator.sub,
    "mul.rn.f32": operator.mul,
    "setp.neu.f32": operator.ne,  # unordered: a NaN is not equal
    "setp.neu.or.f32": lambda a, b, p: (a != b) | p,
    "setp.gt.s32": operator.gt,
    "setp.le.and.s32": lambda a, b, p: (a <= b) & p,
    "selp.f32": lambda a, b, p: torch.where(p, a, b),
    "vote.sync.any.pred": _any_of_warp,
}

_GLUON = types.SimpleNamespace(
    float32=torch.float32,
    int32=torch.int32,
    int64=torch.int64,
    abs=torch.abs,
    arange=lambda start, end, layout: value(torch.arange(start, end)),
    cdiv=lambda a, b: -(-a // b),
    convert_layout=lambda x, layout: x,
    exp2=torch.exp2,
    fma=_fma,
    full=lambda shape, filling, dtype, layout: value(torch.full(shape, float(filling), dtype=dtype)),
    inline_asm_elementwise=_inline_asm,
    load=_load,
    max=torch.amax,
    maximum=lambda a, b: torch.maximum(value(a), value(b)),
    min=torch.amin,
    minimum=lambda a, b: torch.minimum(value(a), value(b)),
    num_warps=lambda: 1,
    reshape=torch.reshape,
    sum=torch.sum,
    where=lambda which, a, b: torch.where(value(which), a, b),
    BlockedLayout=lambda *sizes: None,
    SliceLayout=lambda *sizes: None,
)
