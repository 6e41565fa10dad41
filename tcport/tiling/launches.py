"""What a kernel function launches for a spec and a tile, found by calling it on tensors without data.

A kernel function receives its launcher (``kernels/call.py``); a launcher that only takes notes therefore sees exactly
the kernels, arguments and constants of a real call, and the compile check compiles those and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tcport.ir import AttentionSpec, Dim, KVLayout, TileConfig
from tcport.kernels.call import AttentionCall

_SEQS, _TOKENS, _PAGES = 4, 64, 8


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded launch, ready for Triton's ahead-of-time compiler.

    Attributes:
        kernel: the ``triton.jit`` function.
        signature: parameter -> Triton type, ``constexpr`` for constants.
        constants: parameter -> value of each constant.
        aligned: indices of the parameters that are divisible by 16.
        options: compile options (``num_warps``, ``num_stages``, ...).
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[int, ...]
    options: Mapping[str, Any]


def record(function: Any, call: Any, config: TileConfig) -> tuple[Launch, ...]:
    """The launches of ``function(call, config, launch)``, in order; nothing runs.

    Args:
        function: a kernel entry as ``kernels/call.py`` describes it.
        call: its call, on meta tensors.
    """
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launches.append(_launch(self.kernel, args, kwargs))

    function(call, config, Recorder)
    return tuple(launches)


def attention_call(spec: AttentionSpec) -> AttentionCall:
    """A call on meta tensors that compiles to what any call of this spec compiles to.

    Sizes that kernels do not specialise on (sequences, tokens, table width) are placeholders.
    """
    tokens = _SEQS if spec.form == "decode" else _TOKENS

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query = empty(tokens, spec.num_q_heads, spec.head_dim_qk, dtype=_dtype(spec.query_dtype))
    k_cache = _cache(spec, spec.k_layout, spec.head_dim_qk)
    v_cache = _cache(spec, spec.v_layout, spec.head_dim_v)
    if spec.v_is_view_of_k:
        v_cache = k_cache[..., : spec.head_dim_v]
    columns = _PAGES * spec.k_layout.page_size
    return AttentionCall.of(
        query,
        k_cache,
        v_cache,
        empty(_SEQS, _PAGES, dtype=torch.int32),
        empty(_SEQS, dtype=torch.int32),
        None if spec.form == "decode" else empty(_SEQS + 1, dtype=torch.int32),
        causal=spec.causal,
        window=1024 if spec.window else None,
        chunk=1024 if spec.chunk else None,
        softcap=30.0 if spec.softcap else 0.0,
        alibi_slopes=empty(spec.num_q_heads) if spec.alibi else None,
        sinks=empty(spec.num_q_heads) if spec.sinks else None,
        k_scale=empty(1) if spec.kv_scales else None,
        v_scale=empty(1) if spec.kv_scales else None,
        mask=empty(tokens, columns, dtype=torch.bool) if spec.mask else None,
        num_splits=spec.num_splits,
        batch_invariant=spec.batch_invariant,
        return_lse=spec.return_lse,
    )


def _cache(spec: AttentionSpec, layout: KVLayout, dim: int) -> Tensor:
    page, heads = layout.page_size, spec.num_kv_heads
    usual = (page * heads * dim, heads * dim, dim, 1)
    given = (layout.stride_page, layout.stride_token, layout.stride_head, layout.stride_dim)
    strides = tuple(_size(stride, default) for stride, default in zip(given, usual, strict=True))
    return torch.empty_strided((_PAGES, page, heads, dim), strides, dtype=_dtype(spec.kv_dtype), device="meta")


def _size(size: Dim, placeholder: int) -> int:
    return size if isinstance(size, int) else placeholder


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


_COMPILE_OPTIONS = frozenset(
    {"num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "launch_pdl"}
)


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Triton's own specialisation of arguments: 1 becomes a constant, divisibility by 16 an attribute."""
    options = {name: value for name, value in kwargs.items() if name in _COMPILE_OPTIONS}
    named = dict(zip((p.name for p in kernel.params), args, strict=False))
    named |= {name: value for name, value in kwargs.items() if name not in _COMPILE_OPTIONS}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[int] = []
    for index, param in enumerate(kernel.params):
        value = named.get(param.name, param.default)
        may_specialize = not param.do_not_specialize
        if param.is_constexpr or value is None or (may_specialize and type(value) is int and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = _type(value)
        divisible = isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
        if divisible and may_specialize and not param.do_not_specialize_on_alignment:
            aligned.append(index)
    return Launch(kernel, signature, constants, tuple(aligned), options)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


_TYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2": "fp8e5",
    "float8_e5m2fnuz": "fp8e5b16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}
