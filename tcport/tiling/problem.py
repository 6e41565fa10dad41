"""An attention spec reduced to the numbers that a tile is checked and costed with."""

from __future__ import annotations

import dataclasses

import sympy

from tcport.errors import ArgumentError
from tcport.ir import DIMS_IN_PAIRS, AttentionSpec, Dim

MAX_HEAD_DIM = 1024

# What a symbolic size is taken for where a number is needed: a serving step of the middling kind, or one of drafts.
_DRAFT_TOKENS = 4
NOMINAL_SEQS, NOMINAL_TOKENS_PER_SEQ, NOMINAL_CONTEXT = 16, 256, 4096

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of one attention call, as a tile sees them.

    Attributes:
        rows: query heads of one KV head: the rows that one query token brings.
        dim_qk, dim_v: head dims as tiles span them, in powers of two.
        query_bytes: bytes of one element of the dtype that products are taken in.
        kv_bytes: bytes of one element of the cache.
        bytewise: quantised elements are unpacked one by one, not in pairs.
        run_bytes: bytes of one KV head that lie together in memory: a token's, or a page's in a head-major cache.
        open_batch, open_tokens, open_context: the size is symbolic, and its number is nominal.
    """

    kernel: str
    rows: int
    dim_qk: int
    dim_v: int
    query_bytes: int
    kv_bytes: int
    run_bytes: int
    quantised: bool
    bytewise: bool
    mask: bool
    scales: bool
    bf16: bool
    v_is_view_of_k: bool
    causal: bool
    num_kv_heads: int
    num_seqs: int
    num_tokens: int
    max_context: int
    open_batch: bool
    open_tokens: bool
    open_context: bool

    def scenarios(self) -> tuple[Problem, ...]:
        """The problem at the sizes it may meet: itself, or a spread of batches and lengths where they are open."""
        if not (self.open_batch or self.open_context):
            return (self,)
        batches = (1, 8, 64, 256) if self.open_batch else (self.num_seqs,)
        contexts = (512, NOMINAL_CONTEXT, 32768) if self.open_context else (self.max_context,)
        # Drafts of a few tokens beside prompts: a tile for prompts alone leaves most of its rows empty on them.
        open_tokens = self.open_tokens and self.kernel == "prefill"
        tokens = (_DRAFT_TOKENS, NOMINAL_TOKENS_PER_SEQ) if open_tokens else (self.num_tokens / self.num_seqs,)
        return tuple(
            dataclasses.replace(self, num_seqs=seqs, num_tokens=max(1, round(per_seq * seqs)), max_context=context)
            for per_seq in tokens
            for seqs in batches
            for context in contexts
        )


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
    query_bytes, kv_bytes = dtype_bytes(spec.query_dtype), dtype_bytes(spec.kv_dtype)
    main, rest = split_head_dim(spec.head_dim_qk)
    dim_v = padded(spec.head_dim_v)
    page_run = spec.k_layout.page_size if spec.k_layout.head_major else 1
    # A batch-invariant call must get one tile and one split count whatever its batch: it never sees the sizes.
    blind = spec.batch_invariant
    num_seqs = _number(spec.num_seqs, NOMINAL_SEQS, blind)
    in_pairs = spec.form == "decode" and dim_v >= DIMS_IN_PAIRS and not spec.v_is_view_of_k and query_bytes <= 2
    per_seq = 1 if spec.form == "decode" else NOMINAL_TOKENS_PER_SEQ
    return Problem(
        kernel="decode" if spec.form == "decode" else "prefill",
        rows=spec.group_size,
        dim_qk=main + rest,
        dim_v=dim_v,
        # A 16-bit query against a wider cache is multiplied in fp32.
        query_bytes=max(query_bytes, kv_bytes),
        kv_bytes=kv_bytes,
        run_bytes=page_run * spec.head_dim_qk * kv_bytes,
        quantised=kv_bytes == 1,
        bytewise=kv_bytes == 1 and not in_pairs,
        mask=spec.mask,
        scales=spec.kv_scales,
        bf16="bfloat16" in (spec.query_dtype.removeprefix("torch."), spec.kv_dtype.removeprefix("torch.")),
        v_is_view_of_k=spec.v_is_view_of_k and dim_v == main,
        causal=spec.causal,
        num_kv_heads=spec.num_kv_heads,
        num_seqs=num_seqs,
        num_tokens=_number(spec.num_tokens, num_seqs * per_seq, blind),
        max_context=_number(spec.max_context, NOMINAL_CONTEXT, blind),
        open_batch=blind or is_symbolic(spec.num_seqs),
        open_tokens=blind or is_symbolic(spec.num_tokens),
        open_context=blind or is_symbolic(spec.max_context),
    )


def split_head_dim(dim: int) -> tuple[int, int]:
    """The powers of two that a key tile spans: one, or two where that pads less (576 = 512 + 64, 80 = 64 + 16)."""
    whole = padded(dim)
    main = whole // 2
    rest = padded(dim - main)
    return (main, rest) if main >= 16 and main + rest < whole else (whole, 0)


def padded(size: int) -> int:
    """The power of two that a tile spans to cover ``size``, at least 16 (the depth of a matrix instruction)."""
    return max(16, 1 << (size - 1).bit_length())


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype given by name (``bfloat16`` or ``torch.bfloat16``).

    Raises:
        ArgumentError: when tcport does not know the dtype.
    """
    name = dtype.removeprefix("torch.")
    if name.startswith("float8_"):
        return 1
    if name not in _BYTES:
        raise ArgumentError(f"The spec has dtype {dtype!r}.", f"Give one of {', '.join(_BYTES)} or a float8 dtype.")
    return _BYTES[name]


def is_symbolic(size: Dim) -> bool:
    return isinstance(size, sympy.Expr) and not size.is_number


def _number(size: Dim, nominal: int, blind: bool) -> int:
    return nominal if blind or is_symbolic(size) else max(1, int(size))
