"""An attention spec reduced to the numbers that a tile is checked and costed with."""

from __future__ import annotations

import dataclasses

import sympy

from tcport.errors import ArgumentError
from tcport.ir import AttentionSpec, Dim

MAX_HEAD_DIM = 1024
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of one attention call; head dims are padded to the power of two that a tile spans."""

    kernel: str
    rows: int
    dim_qk: int
    dim_v: int
    query_bytes: int
    kv_bytes: int
    v_is_view_of_k: bool
    num_kv_heads: int
    num_seqs: Dim
    num_tokens: Dim
    max_context: Dim
    page_size: int


def problem_of(spec: AttentionSpec) -> Problem:
    """Reduces a spec.

    Raises:
        ArgumentError: when the head counts, head dims or dtypes of the spec are impossible.
    """
    if spec.num_kv_heads < 1 or spec.num_q_heads < 1 or spec.num_q_heads % spec.num_kv_heads:
        raise ArgumentError(
            f"The spec has {spec.num_q_heads} query heads and {spec.num_kv_heads} KV heads.",
            "The number of query heads must be a positive multiple of the number of KV heads.",
        )
    if not (1 <= spec.head_dim_qk <= MAX_HEAD_DIM and 1 <= spec.head_dim_v <= MAX_HEAD_DIM):
        raise ArgumentError(
            f"The spec has head dims {spec.head_dim_qk} and {spec.head_dim_v}.", f"They must be 1 to {MAX_HEAD_DIM}."
        )
    return Problem(
        kernel="decode" if spec.form == "decode" else "prefill",
        rows=spec.group_size,
        dim_qk=padded(spec.head_dim_qk),
        dim_v=padded(spec.head_dim_v),
        query_bytes=dtype_bytes(spec.query_dtype),
        kv_bytes=dtype_bytes(spec.kv_dtype),
        v_is_view_of_k=spec.v_is_view_of_k,
        num_kv_heads=spec.num_kv_heads,
        num_seqs=spec.num_seqs,
        num_tokens=spec.num_tokens,
        max_context=spec.max_context,
        page_size=spec.k_layout.page_size,
    )


def padded(size: int) -> int:
    """The power of two that a tile spans to cover ``size``, at least 16 (the depth of a matrix instruction)."""
    return max(16, 1 << (size - 1).bit_length())


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype given by name (``bfloat16`` or ``torch.bfloat16``)."""
    name = dtype.removeprefix("torch.")
    if name.startswith("float8_"):
        return 1
    if name not in _BYTES:
        raise ArgumentError(f"The spec has dtype {dtype!r}.", f"Give one of {', '.join(_BYTES)} or a float8 dtype.")
    return _BYTES[name]


def is_symbolic(size: Dim) -> bool:
    return isinstance(size, sympy.Expr) and not size.is_number
