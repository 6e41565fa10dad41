"""Operators that graph passes put in the place of a layer operator and the quantise behind it.

``tcport::silu_mul_quantise`` and ``tcport::add_rms_norm_quantise``; meanings in :mod:`tcport.kernels.quantise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport.kernels import quantise
from tcport.operator_library import LIBRARY, TAGS


def _quantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = (*x.shape[:-1], 1) if scale is None else (0,)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(scales, dtype=torch.float32)


def _fake_silu_mul(gate: Tensor, up: Tensor, scale: Tensor | None, dtype: torch.dtype, *how: Any) -> Any:
    return _quantised(gate, scale, dtype)


def _fake_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor | None, dtype: torch.dtype, *how: Any
) -> Any:
    return x.new_empty(x.shape), *_quantised(x, scale, dtype)


_HOW = "Tensor? scale, ScalarType dtype, bool multiply=False, float amax_floor=0.0, float scale_floor=0.0"
for _name, _signature, _run, _fake in (
    (
        "silu_mul_quantise",
        f"(Tensor gate, Tensor up, {_HOW}) -> (Tensor quantised, Tensor scales)",
        quantise.silu_mul_quantise,
        _fake_silu_mul,
    ),
    (
        "add_rms_norm_quantise",
        f"(Tensor x, Tensor residual, Tensor weight, float eps, {_HOW}) "
        "-> (Tensor total, Tensor quantised, Tensor scales)",
        quantise.add_rms_norm_quantise,
        _fake_add_rms_norm,
    ),
):
    LIBRARY.define(f"{_name}{_signature}", tags=TAGS)
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tcport::{_name}", _fake, lib=LIBRARY)
