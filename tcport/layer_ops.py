"""Operators that graph passes put in the place of what models spell out; nobody calls them by hand.

``tcport::silu_mul`` and ``tcport::add_rms_norm``; meanings in :mod:`tcport.kernels.layers`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.kernels import layers
from tcport.operator_library import LIBRARY, TAGS


def _fake_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


for _name, _signature, _run, _fake in (
    ("silu_mul", "(Tensor gate, Tensor up) -> Tensor", layers.silu_mul, _fake_silu_mul),
    (
        "add_rms_norm",
        "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor total, Tensor normed)",
        layers.add_rms_norm,
        _fake_add_rms_norm,
    ),
):
    LIBRARY.define(f"{_name}{_signature}", tags=TAGS)
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tcport::{_name}", _fake, lib=LIBRARY)
