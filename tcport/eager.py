"""What ``tcport::paged_attention`` and ``tcport::kv_write`` run when they are called outside compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport import checks, ops
from tcport.kernels import blocked, decomposition
from tcport.kernels.call import AttentionCall, WriteCall


def _paged_attention(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    checks.check_paged_attention(*args, **options)
    return blocked.paged_attention(AttentionCall.of(*args, **options))


def _kv_write(*args: Any, **options: Any) -> None:
    checks.check_kv_write(*args, **options)
    with torch.no_grad():
        decomposition.kv_write(WriteCall.of(*args, **options))


ops.LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
ops.LIBRARY.impl("kv_write", _kv_write, "CompositeExplicitAutograd")
