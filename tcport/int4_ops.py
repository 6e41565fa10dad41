"""``tcport::w4a16_matmul``, which the pass ``fuse_int4_matmul`` makes; meaning in :mod:`tcport.kernels.int4`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tcport.kernels import int4
from tcport.operator_library import LIBRARY, TAGS


def _fake(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], scales.shape[1]))


def define(name: str, run: Callable[..., Tensor]) -> None:
    """Define an operator ``tcport::<name>`` of the same arguments and result."""
    signature = "(Tensor x, Tensor packed, Tensor scales, Tensor? zeros) -> Tensor"
    LIBRARY.define(f"{name}{signature}", tags=TAGS)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tcport::{name}", _fake, lib=LIBRARY)


define("w4a16_matmul", int4.w4a16_matmul)
