# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""What a split of the keys leaves of its softmax: the largest logit and the sum of weights relative to it.

Not their LSE, in which the sum would be lost where logits are huge: at 1e7, fp32 holds no digit behind the point, and
a split would weigh the same whatever number of keys it holds. Both are in one word, as one load then brings both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcport.kernels.triton_tile import LN2


@triton.jit
def pack_softmax(maximum, denominator):
    """Base-2 maximum and sum of weights, fp32, in the upper and lower half of an int64."""
    upper = maximum.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return upper | denominator.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def unpack_softmax(word):
    """Maximum and sum that :func:`pack_softmax` was given."""
    maximum = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return maximum, word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def lse_of(maximum, denominator):
    """LSE of a softmax whose maximum is in base 2; -inf where it has no keys, with a maximum of -inf and a sum of 0."""
    return (maximum + tl.log2(denominator)) * LN2
