"""Gluon kernels carried out in PyTorch, program by program: their logic without a GPU, for Gluon has no interpreter.

A tensor is a :class:`Values` whatever its layout; conversions of layouts, and waiting for copies, do nothing. What is
loaded under no mask, and given no other value, has all bits set. There is as much of the language as
``kernels/gluon_int4.py`` and ``gluon_int4_product.py`` speak. That a conversion moves nothing between threads is for
the compiler to say, which is asked with ``assert_trivial``.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def run_programs(
    kernel: Any, modules: tuple[ModuleType, ...], grid: tuple[int, ...], arguments: dict[str, Any]
) -> None:
    """Run a kernel, and what it calls of its modules, for every program of a grid; outputs are written."""
    for program in itertools.product(*map(range, grid)):
        names: dict[str, Any] = {"range": lambda *ends: map(_Number, range(*ends))} | _language(program)
        for name, value in itertools.chain(*(vars(module).items() for module in modules)):
            if hasattr(value, "fn"):
                names[name] = types.FunctionType(value.fn.__code__, names, name)
        given = {name: Pointer(a) if isinstance(a, Tensor) else a for name, a in arguments.items()}
        names[kernel.fn.__name__](**given)


class Launched:
    """A launcher's kernel: ``Launched(*modules)(kernel)[grid](...)`` runs it."""

    def __init__(self, *modules: ModuleType) -> None:
        self._modules = modules

    def __call__(self, kernel: Any) -> Any:
        def run(grid: tuple[Any, ...], **arguments: Any) -> None:
            known = {name: value for name, value in arguments.items() if name in kernel.arg_names}
            run_programs(kernel, self._modules, tuple(map(int, grid)), known)

        class Grid:
            def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
                return lambda **arguments: run(grid, **arguments)

        return Grid()


@dataclasses.dataclass
class Values:
    """A tensor of the language."""

    of: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.of.shape)

    def reshape(self, shape: list[int]) -> Values:
        return Values(self.of.reshape(shape))

    def permute(self, order: list[int]) -> Values:
        return Values(self.of.permute(order))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Values:
        if bitcast:
            return Values(self.of.contiguous().view(dtype))
        return Values(_wrapped(self.of, 16) if dtype == torch.int16 else self.of.to(dtype))

    def __getitem__(self, index: Any) -> Values:
        return Values(self.of[index])

    def __add__(self, other: Any) -> Any:
        return other + self if isinstance(other, Pointer) else Values(self.of + _plain(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Values:
        return Values(self.of - _plain(other))

    def __neg__(self) -> Values:
        return Values(-self.of)

    def __mul__(self, other: Any) -> Values:
        return Values(self.of * _plain(other))

    def __and__(self, other: Any) -> Values:
        return Values(self.of & _plain(other))

    def __lt__(self, other: Any) -> Values:
        return Values(self.of < _plain(other))

    def __floordiv__(self, other: int) -> Values:
        return Values(self.of // other)

    def __mod__(self, other: int) -> Values:
        return Values(self.of % other)

    def __rshift__(self, other: int) -> Values:
        return Values(self.of >> other)


@dataclasses.dataclass
class Pointer:
    """Addresses within a tensor, in elements from its first one."""

    into: Tensor
    at: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.into.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.into, self.at + _plain(other))

    __radd__ = __add__


class _Number(int):
    """An integer that only the running kernel knows."""

    def to(self, dtype: torch.dtype) -> _Number:
        return self


class _Buffers:
    """Shared memory: one tensor for each place in its first dimension."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def index(self, place: int) -> _Buffers:
        return _Buffers(self._memory[place])

    def load(self, layout: object) -> Values:
        return Values(self._memory.clone())

    def store(self, values: Values) -> None:
        assert self._memory.shape == values.of.shape
        self._memory.copy_(values.of)

    def reinterpreted(self, shape: list[int]) -> _Buffers:
        return _Buffers(self._memory.view(shape))


def _plain(value: Any) -> Any:
    return value.of if isinstance(value, Values) else value


def _wrapped(value: Tensor, bits: int) -> Tensor:
    """The low bits as a signed integer of as many."""
    half = 1 << (bits - 1)
    return ((value.long() + half) % (2 * half) - half).to(getattr(torch, f"int{bits}"))


def _load(at: Pointer, mask: Values, other: float = -1) -> Values:
    places, there = torch.broadcast_tensors(torch.as_tensor(at.at), mask.of)
    elements = at.into.untyped_storage().nbytes() // at.into.element_size()
    memory = at.into.as_strided((elements,), (1,), 0)
    found = memory[torch.where(there, places + at.into.storage_offset(), 0)]
    return Values(torch.where(there, found, torch.tensor(other, dtype=memory.dtype)))


def _store(at: Pointer, value: Values, mask: Values) -> None:
    places, there, values = torch.broadcast_tensors(at.at, mask.of, value.of)
    at.into.view(-1)[places[there]] = values[there]


def _copy(buffer: _Buffers, at: Pointer, mask: Values) -> None:
    """Of what is masked, zeros are copied (PTX ISA, ``cp.async`` with fewer bytes of source)."""
    buffer.store(_load(at, mask, 0))


def _assembly(text: str, constraints: str, operands: list[Values], **_: Any) -> Values:
    """``prmt`` of two registers, ``lop3`` as and-or with two constants, ``fma`` of pairs times one; barrier (PTX)."""
    name, *parts = text.replace(",", " ").strip(" ;").split()
    if name == "{" and (parts[5], parts[6]) in (("0x3f803f80;", "fma.rn.bf16x2"), ("0x3c003c00;", "fma.rn.f16x2")):
        return operands[0] + operands[1]
    if name == "bar.warp.sync":
        return operands[0]
    bits = [operand.of.long() & 0xFFFFFFFF for operand in operands]
    if name == "prmt.b32":
        taken = [int(digit, 16) for digit in reversed(parts[-1].removeprefix("0x"))]
        chosen = [((bits[byte // 4] >> (8 * (byte % 4))) & 0xFF) << (8 * place) for place, byte in enumerate(taken)]
        return Values(_wrapped(sum(chosen, torch.zeros_like(bits[0])), 32))
    if name == "lop3.b32" and parts[-1] == "0xea":
        return Values(_wrapped((bits[0] & int(parts[2], 16)) | int(parts[3], 16), 32))
    raise NotImplementedError(text)


def _multiply(a: Values, b: Values, c: Values) -> Values:
    return Values(torch.baddbmm(c.of, a.of.float(), b.of.float()))


def _language(program: tuple[int, ...]) -> dict[str, Any]:
    """The names that a kernel's module has imported."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    language = SimpleNamespace(
        program_id=lambda axis: _Number(program[axis]),
        arange=lambda start, end, layout=None: Values(torch.arange(start, end)),
        load=_load,
        store=_store,
        zeros=lambda shape, dtype, layout: Values(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: Values(torch.full(shape, value, dtype=dtype)),
        split=lambda x: (Values(x.of[..., 0]), Values(x.of[..., 1])),
        join=lambda a, b: Values(torch.stack((a.of, b.of), -1)),
        sum=lambda x, axis: Values(x.of.sum(axis)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        inline_asm_elementwise=_assembly,
        allocate_shared_memory=lambda dtype, shape, layout: _Buffers(torch.full(shape, -1, dtype=dtype)),
        static_range=range,
        nvidia=SimpleNamespace(ampere=SimpleNamespace(mma_v2=_multiply)),
        **dict.fromkeys(("SliceLayout", "DotOperandLayout", "SwizzledSharedLayout"), nothing),
        **dict.fromkeys(("NVMMADistributedLayout", "DistributedLinearLayout"), nothing),
        **{name: getattr(torch, name) for name in ("int64", "int32", "int16", "float32", "bfloat16", "float16")},
    )
    waiting = SimpleNamespace(commit_group=nothing, wait_group=nothing)
    return {
        "gl": language,
        "async_copy": waiting,
        "copy_async": _copy,
        "barrier": nothing,
        "reinterpret": lambda buffers, dtype, shape, layout: buffers.reinterpreted(shape),
    }
