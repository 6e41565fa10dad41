"""What ``tcport::paged_attention`` and ``tcport::kv_write`` run when they are called outside compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport import checks, ops
from tcport.kernels import reference


def _paged_attention(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    checks.check_paged_attention(*args, **options)
    query = args[0]
    for name in ("num_splits", "batch_invariant"):
        options.pop(name, None)
    return_lse = options.pop("return_lse", False)
    out, lse = reference.paged_attention(*args, **options)
    return out.to(query.dtype), lse if return_lse else lse.new_empty(0)


def _kv_write(*args: Any, **options: Any) -> None:
    checks.check_kv_write(*args, **options)
    with torch.no_grad():
        reference.kv_write(*args, **options)


ops.LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
ops.LIBRARY.impl("kv_write", _kv_write, "CompositeExplicitAutograd")
