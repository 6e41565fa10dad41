"""How models spell rotary embeddings and the norm of query and key: the patterns of ``fuse_rope_write``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from tcport.pattern import Pattern, number, tensor


def half_by_slices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate_half`` of transformers."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def half_by_chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def even_and_odd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def complex_product(x: Tensor, freqs: Tensor) -> Tensor:
    """``view_as_complex`` of the first Llama and of nano models."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(-2).type_as(x)


def norm_of_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight.shape, weight, eps)


def norm_of_transformers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _first(x: Tensor, *rest: object) -> Tensor:
    return x


HALVES = Pattern((half_by_slices, half_by_chunks), _first, x=tensor("... 2c"), cos=tensor("* 2c"), sin=tensor("* 2c"))
PAIRS = Pattern(even_and_odd, _first, x=tensor("... 2c"), cos=tensor("* c"), sin=tensor("* c"))
COMPLEX = Pattern(complex_product, _first, x=tensor("... 2c"), freqs=tensor("* c", torch.complex64))
NORM = Pattern((norm_of_torch, norm_of_transformers), _first, x=tensor("... d"), weight=tensor("d"), eps=number())
