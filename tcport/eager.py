"""What ``tcport::paged_attention`` and ``tcport::kv_write`` run when they are called outside compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport import chain, checks, debug, ops
from tcport.lowering.operators import KV_WRITE, PAGED_ATTENTION


def _paged_attention(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    checks.check_paged_attention(*args, **options)
    call = PAGED_ATTENTION.call(*args, **options)
    if debug.is_on():
        debug.check_attention(call)
        with debug.poisoned():
            return chain.run(PAGED_ATTENTION, call)
    return chain.run(PAGED_ATTENTION, call)


def _kv_write(*args: Any, **options: Any) -> None:
    checks.check_kv_write(*args, **options)
    call = KV_WRITE.call(*args, **options)
    if debug.is_on():
        debug.check_write(call)
    with torch.no_grad():
        chain.run(KV_WRITE, call)


ops.LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
ops.LIBRARY.impl("kv_write", _kv_write, "CompositeExplicitAutograd")
