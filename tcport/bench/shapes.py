"""The shapes that the cost model is held to: decode, ragged, verify, prefill and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tcport.bench.cases import Case, ragged


def _cases(kind: Any, batches: Sequence[int], contexts: Sequence[int], **changes: Any) -> list[Case]:
    return [Case(kind, (context,) * batch, **changes) for batch in batches for context in contexts]


SHAPES: tuple[Case, ...] = (
    *_cases("decode", (1, 8, 64), (512, 2048, 8192)),
    *_cases("decode", (1, 4), (32768,)),
    *_cases("decode", (256,), (512, 2048)),
    *_cases("decode", (16,), (4096,), heads=(64, 8)), *_cases("decode", (16,), (4096,), heads=(32, 32)),
    *_cases("decode", (16,), (4096,), heads=(40, 8)), *_cases("decode", (16,), (4096,), heads=(28, 4)),
    *_cases("decode", (2, 32), (4096,), heads=(96, 8)),
    *_cases("decode", (8, 64), (4096,), dims=(64, 64)), *_cases("decode", (8, 64), (4096,), dims=(256, 256)),
    *_cases("decode", (32,), (4096,), dims=(96, 96)),
    *_cases("decode", (8, 64), (4096,), page=128), *_cases("decode", (64,), (4096,), page=256),
    *_cases("decode", (8, 64), (8192,), kv_dtype="float8_e4m3fn"),
    *(Case("decode", ragged(n, 32, 16384), label=f"ragged {n}, 32 to 16384") for n in (4, 16, 64)),
    *(Case("decode", (4096,) * n, (q,) * n, label=f"b{n} c4096 q{q}") for n, q in ((1, 4), (16, 4), (64, 2), (64, 8))),
    *(Case("prefill", (n,) * b, (n,) * b) for b, n in ((1, 512), (1, 2048), (1, 4096), (4, 1024), (8, 2048))),
    *(Case("prefill", (n,), (n,), dims=(d, d)) for n, d in ((4096, 64), (2048, 256))),
    *(Case("prefill", (context,), (512,)) for context in (4096, 16384)),
    Case("mixed", (4096,) * 32 + (4096,), (1,) * 32 + (1024,), label="32 decodes at 4096, chunk 1024 on 4096"),
    Case("mixed", (1024,) * 8 + (512,), (1,) * 8 + (512,), label="8 decodes at 1024, prompt 512"),
)  # fmt: skip
