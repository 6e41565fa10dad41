"""``tcport::rope_and_write``: query-key norm, rotary embedding and cache write of new tokens, as one operator.

Nobody calls it by hand: the pass ``fuse_rope_write`` makes it of what a model spells out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport import checks
from tcport.errors import ShapeError
from tcport.inference_only import forbid_backward
from tcport.kernels.rope import RopeWriteCall, rotated
from tcport.operator_library import LIBRARY, TAGS


def check_rope_and_write(call: RopeWriteCall) -> None:
    """Refuse a call whose parts do not fit together.

    Raises:
        ShapeError, DtypeError, DeviceMismatchError, ArgumentError: see :mod:`tcport.checks`.
    """
    checks.check_kv_write(**vars(call.write))
    tokens, _, dim = call.query.shape
    width = dim // 2 if call.interleaved else dim
    for name, table in (("cos", call.cos), ("sin", call.sin)):
        if tuple(table.shape) != (tokens, width):
            raise ShapeError(
                f"{name} is {list(table.shape)} for {tokens} tokens of head dim {dim}.",
                f"Give [{tokens}, {width}]: one row a token.",
            )
    if dim % 2 or call.write.key.shape[-1] != dim or call.write.key.shape[0] != tokens:
        raise ShapeError(
            f"The query is {list(call.query.shape)} and the key {list(call.write.key.shape)}.",
            "Give both the same tokens and the same even head dim.",
        )


def _run(*args: Any, **options: Any) -> Tensor:
    call = RopeWriteCall.of(*args, **options)
    check_rope_and_write(call)
    query, key = rotated(call)
    torch.ops.tcport.kv_write(**{**vars(call.write), "key": key})
    return query


def _fake(*args: Any, **options: Any) -> Tensor:
    call = RopeWriteCall.of(*args, **options)
    check_rope_and_write(call)
    return call.query.new_empty(call.query.shape)


LIBRARY.define(
    "rope_and_write(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slot_mapping, *, Tensor? q_weight=None, Tensor? k_weight=None, float eps=0.0, "
    "bool interleaved=False, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
    tags=TAGS,
)
LIBRARY.impl("rope_and_write", _run, "CompositeExplicitAutograd")
torch.library.register_fake("tcport::rope_and_write", _fake, lib=LIBRARY)
forbid_backward(LIBRARY, "rope_and_write")
