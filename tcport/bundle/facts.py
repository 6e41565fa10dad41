"""Which kernels a bundle has for a spec: the facts that a kernel is compiled for, the sizes and strides left out."""

from __future__ import annotations

import dataclasses
from typing import Any

_OPEN = ("num_seqs", "num_tokens", "max_context", "k_layout", "v_layout", "num_splits", "batch_invariant")


def facts_of(spec: Any) -> dict[str, Any]:
    """The facts of a spec of attention or of a cache write that a compiled kernel is for.

    Strides are left out: a launch compares them one by one. So are the number of splits and sizes that stay open.
    """
    facts = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in _OPEN}
    return facts | {"page_size": spec.k_layout.page_size}
