"""``tcport::w4a16_matmul``, which the pass ``fuse_int4_matmul`` makes; meaning in :mod:`tcport.kernels.int4`."""

from __future__ import annotations

import torch
from torch import Tensor

from tcport.kernels import int4
from tcport.ops import LIBRARY, TAGS


def _fake(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], scales.shape[1]))


LIBRARY.define("w4a16_matmul(Tensor x, Tensor packed, Tensor scales, Tensor? zeros) -> Tensor", tags=TAGS)
LIBRARY.impl("w4a16_matmul", int4.w4a16_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("tcport::w4a16_matmul", _fake, lib=LIBRARY)
