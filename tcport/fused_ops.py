"""``tcport::write_and_attend``: the cache write of new tokens and the attention that follows it, as one operator.

Nobody calls it by hand: the pass ``merge_kv_write`` makes it of the two. As one node the pair needs no copy of the
cache between write and read, and nothing can come between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport import checks
from tcport.inference_only import forbid_backward
from tcport.kernels.call import WriteAndAttendCall
from tcport.operator_library import LIBRARY, TAGS

WRITE_ARGUMENTS = ("key", "value", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale")
"""The arguments it shares with ``tcport::kv_write``."""


def check_write_and_attend(*args: Any, **options: Any) -> None:
    """Refuse a call of which either half is refused.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError, ArgumentError: see :mod:`tcport.checks`.
    """
    write, attend = WriteAndAttendCall.halves(*args, **options)
    checks.check_kv_write(**write)
    checks.check_paged_attention(**attend)


def _fake(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    check_write_and_attend(*args, **options)
    attend = WriteAndAttendCall.halves(*args, **options)[1]
    query, v_cache = attend["query"], attend["v_cache"]
    lse_shape = query.shape[:-1] if options.get("return_lse", False) else (0,)
    out = query.new_empty((*query.shape[:-1], *v_cache.shape[-1:]))
    return out, query.new_empty(lse_shape, dtype=torch.float32)


LIBRARY.define(
    "write_and_attend(Tensor query, Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q=None, *, float? scale=None, "
    "bool causal=True, int? window=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? mask=None, int? chunk=None, int? num_splits=None, "
    "bool batch_invariant=False, bool return_lse=False) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
torch.library.register_fake("tcport::write_and_attend", _fake, lib=LIBRARY)
forbid_backward(LIBRARY, "write_and_attend")
