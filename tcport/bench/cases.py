"""What the bench measures: named cases, suites of them, and cases spelt on the command line."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any, Literal

import torch

from tcport.errors import ArgumentError

Kind = Literal["decode", "prefill", "mixed", "write"]

_PART = re.compile(r"(h|d|b|c|q|p)(\d+)(?:-(\d+))?")
_SPELLING = "h32-8 d128 b64 c8192 p16 [q4] [bf16|fp16|fp32] [kv:fp8] [write]"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "int8": "int8"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        lens: keys of each sequence; of a write, the tokens written.
        q_lens: query tokens of each sequence; None: one each, in the decode form.
        heads: query and KV heads.
        dims: head dims of K and V.
        page: tokens of a page.
        dtype, kv_dtype: torch's names.
    """

    kind: Kind
    lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    page: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    label: str = ""

    @property
    def name(self) -> str:
        """As ``--case`` takes it, where the case can be spelt so."""
        if self.label:
            return self.label
        short = {name: spelling for spelling, name in DTYPES.items()}
        parts = [f"h{self.heads[0]}-{self.heads[1]}", f"d{self.dims[0]}", f"b{len(self.lens)}", f"c{self.lens[0]}"]
        parts += [f"q{self.q_lens[0]}"] if self.q_lens else []
        parts += [f"p{self.page}"] if self.page != 16 else []
        parts += [short[self.dtype]] if self.dtype != "bfloat16" else []
        parts += [f"kv:{short[self.kv_dtype]}"] if self.kv_dtype != self.dtype else []
        return " ".join([*parts, "write"] if self.kind == "write" else parts)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that belong to the case's tokens."""
        return sum(self.lens) * self.heads[1] * sum(self.dims) * getattr(torch, self.kv_dtype).itemsize

    @property
    def flops(self) -> float:
        """Of the two products of causal attention: each query token with the keys up to its own."""
        queries = self.q_lens or (1,) * len(self.lens)
        pairs = sum(q * n - q * (q - 1) / 2 for q, n in zip(queries, self.lens, strict=True))
        return 2.0 * pairs * self.heads[0] * sum(self.dims)


def parse_case(text: str) -> Case:
    """A case as ``h32-8 d128 b64 c8192 p16 q4 kv:fp8`` spells it: heads, head dim, batch, context, page, query tokens.

    Raises:
        ArgumentError: a part that is none of these, or no batch or context.
    """
    numbers: dict[str, tuple[int, int | None]] = {}
    options: dict[str, Any] = {}
    for part in text.split():
        if found := _PART.fullmatch(part):
            numbers[found[1]] = (int(found[2]), int(found[3]) if found[3] else None)
        elif part in DTYPES:
            options["dtype"] = DTYPES[part]
        elif part.startswith("kv:") and part[3:] in DTYPES:
            options["kv_dtype"] = DTYPES[part[3:]]
        elif part == "write":
            options["kind"] = "write"
        else:
            raise ArgumentError(f"The case {text!r} has a part {part!r}.", f"Spell a case like {_SPELLING!r}.")
    if not {"b", "c"} <= numbers.keys() or 0 in [value for value, _ in numbers.values()]:
        raise ArgumentError(f"The case {text!r} has no batch (b) or no context (c).", f"Spell it like {_SPELLING!r}.")
    batch, context, query = (numbers.get(key, (0, None))[0] for key in "bcq")
    q_heads, kv_heads = numbers.get("h", (32, 8))
    dim, dim_v = numbers.get("d", (128, None))
    kind: Kind = options.pop("kind", "prefill" if query > 16 else "decode")
    options.setdefault("kv_dtype", options.get("dtype", "bfloat16"))
    return Case(
        kind=kind,
        lens=(context,) * batch,
        q_lens=(query,) * batch if query else None,
        heads=(q_heads, kv_heads or q_heads),
        dims=(dim, dim_v or dim),
        page=numbers.get("p", (16, None))[0],
        **options,
    )


def ragged(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths spread evenly over the logarithm, in an order that is always the same."""
    steps = [shortest * (longest / shortest) ** (i / max(1, batch - 1)) for i in range(batch)]
    return tuple(random.Random(0).sample([round(step) for step in steps], batch))


def _decode(batch: int, context: int, **changes: Any) -> Case:
    return Case("decode", (context,) * batch, **changes)


def _prefill(batch: int, tokens: int, context: int | None = None, **changes: Any) -> Case:
    return Case("prefill", (context or tokens,) * batch, (tokens,) * batch, **changes)


SUITES: dict[str, tuple[Case, ...]] = {
    "decode": (
        _decode(1, 128), _decode(8, 128), _decode(1, 8192), _decode(8, 2048), _decode(1, 131072), _decode(64, 1024),
        _decode(64, 8192), _decode(256, 512),
        Case("decode", ragged(64, 32, 32768), label="ragged 64, 32 to 32768"),
        _decode(64, 8192, heads=(64, 8)), _decode(64, 8192, heads=(32, 32)), _decode(64, 8192, heads=(40, 8)),
        _decode(64, 4096, dims=(64, 64)), _decode(64, 4096, dims=(256, 256)), _decode(64, 8192, page=128),
        _decode(64, 8192, kv_dtype="float8_e4m3fn"),
        Case("decode", (8192,) * 64, (4,) * 64, label="h32-8 d128 b64 c8192 q4 (verify)"),
    ),
    "prefill": (
        _prefill(1, 512), _prefill(1, 4096), _prefill(8, 2048), _prefill(1, 32768), _prefill(1, 2048, 16384),
        _prefill(1, 4096, dims=(64, 64)), _prefill(1, 4096, dims=(256, 256)),
    ),
    "mixed": (
        Case("mixed", (4096,) * 64 + (8192,), (1,) * 64 + (2048,), label="64 decodes at 4096, chunk 2048 on 8192"),
    ),
    "write": (Case("write", (8192,)), Case("write", (64,)), Case("write", (8192,), kv_dtype="float8_e4m3fn")),
}  # fmt: skip
