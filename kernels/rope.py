"""Query-key norm, rotary embedding and cache write of new tokens: the definition in plain PyTorch, and the call.

Arithmetic is done in ``compute_dtype`` (fp32, or fp64 for an oracle); the rotated query and key are rounded once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tcport.kernels.call import WriteCall


@dataclasses.dataclass(frozen=True)
class RopeWriteCall:
    """The arguments of ``tcport::rope_and_write``.

    Attributes:
        query: ``[T, Hq, D]``, any strides.
        write: the cache write, with the key ``[T, Hkv, D]`` as it is before norm and rotation.
        cos, sin: ``[T, D]``, or ``[T, D / 2]`` where pairs are interleaved; any float dtype, any strides.
        q_weight, k_weight: ``[D]``, the weights of the norms; None: no norm. Both are given or none.
        eps: added to the mean square. interleaved: components ``2i`` and ``2i + 1`` are a pair, not ``i`` and
            ``i + D / 2``.
    """

    query: Tensor
    write: WriteCall
    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    interleaved: bool = False

    @property
    def k_cache(self) -> Tensor:
        """The cache of keys."""
        return self.write.k_cache

    @property
    def v_cache(self) -> Tensor:
        """The cache of values."""
        return self.write.v_cache

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        **options: Any,
    ) -> RopeWriteCall:
        """The call behind the operator's own arguments."""
        write = WriteCall.of(key, value, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        return cls(query, write, cos, sin, **options)


def rotated(call: RopeWriteCall, compute_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The query ``[T, Hq, D]``, contiguous, and the key as it is written, ``[T, Hkv, D]``, each in its own dtype.

    Source: RoFormer, arXiv:2104.09864, section 3.4.2; norms as Qwen3's, before the rotation, over each head.
    """
    query = _rotate(_norm(call.query, call.q_weight, call.eps, compute_dtype), call, compute_dtype)
    key = _rotate(_norm(call.write.key, call.k_weight, call.eps, compute_dtype), call, compute_dtype)
    return query.to(call.query.dtype).contiguous(), key.to(call.write.key.dtype)


def _norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


def _rotate(x: Tensor, call: RopeWriteCall, dtype: torch.dtype) -> Tensor:
    cos, sin = (table.to(dtype)[:, None] for table in (call.cos, call.sin))
    if call.interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
