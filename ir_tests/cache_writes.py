"""Models that write to a KV cache and attend over it, for every layout of the cache, and their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

import tcport

PAGES, PAGE, HEADS, KV_HEADS, DIM, SEQUENCES = 24, 4, 4, 2, 8, 3
CACHE = (PAGES, PAGE, KV_HEADS, DIM)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's arguments beside the cache, the same for every layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor
    lens: Tensor
    slots: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())


def step(seed: int = 0) -> Step:
    rng = torch.Generator().manual_seed(seed)
    table = torch.randperm(PAGES, generator=rng)[: SEQUENCES * 5].reshape(SEQUENCES, 5)
    lens = torch.tensor([7, 1, 20])
    slots = table.gather(1, ((lens - 1) // PAGE)[:, None]).squeeze(1) * PAGE + (lens - 1) % PAGE
    query = torch.randn(SEQUENCES, HEADS, DIM, generator=rng)
    key, value = (torch.randn(SEQUENCES, KV_HEADS, DIM, generator=rng) for _ in "kv")
    return Step(query, key, value, table.int(), lens.int(), slots)


def write(kc: Tensor, vc: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    tcport.kv_write(key, value, kc, vc, slots)


def layer(
    kc: Tensor, vc: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, slots: Tensor
) -> Tensor:
    """Write the new token, attend, and something around them for Inductor to fuse."""
    write(kc, vc, k * 2, v, slots)
    return tcport.paged_attention(q + 1, kc, vc, table, lens) * 3


def indexed(pool: Tensor, *rest: Tensor) -> Tensor:
    return layer(pool[0], pool[1], *rest)


def unbound(pool: Tensor, *rest: Tensor) -> Tensor:
    return layer(*pool.unbind(1), *rest)


def split(pool: Tensor, *rest: Tensor) -> Tensor:
    return layer(*pool.split(DIM, -1), *rest)


def head_major(pool: Tensor, *rest: Tensor) -> Tensor:
    return layer(pool[0].transpose(1, 2), pool[1].transpose(1, 2), *rest)


def bytes_as_fp8(kc: Tensor, vc: Tensor, *rest: Tensor) -> Tensor:
    return layer(kc.view(torch.float8_e4m3fn), vc.view(torch.float8_e4m3fn), *rest)


def pool_of_layers(pool: Tensor, q: Tensor, *rest: Tensor) -> Tensor:
    for number in range(2):
        q = layer(pool[number, 0], pool[number, 1], q, *rest)
    return q


class Registered(torch.nn.Module):
    """The cache as a buffer of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pool", noise(2, *CACHE))

    def forward(self, *rest: Tensor) -> Tensor:
        return layer(self.pool[0], self.pool[1], *rest)  # type: ignore[index]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(7))
    return made.to(torch.float8_e4m3fn).view(torch.uint8) if dtype == torch.uint8 else made


def two_tensors() -> tuple[Tensor, ...]:
    return noise(*CACHE), noise(*CACHE) + 1


LAYOUTS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "two tensors": (layer, two_tensors),
    "two halves of one tensor as two inputs": (layer, lambda: tuple(noise(2, *CACHE))),
    "halves behind an offset": (layer, lambda: tuple(noise(3, *CACHE)[1:])),
    "one tensor, indexed inside": (indexed, lambda: (noise(2, *CACHE),)),
    "a part of a pool, indexed inside": (indexed, lambda: (noise(3, *CACHE)[1:],)),
    "K and V beside each other, unbound inside": (unbound, lambda: (noise(PAGES, 2, *CACHE[1:]),)),
    "K and V of a head beside each other, split inside": (split, lambda: (noise(*CACHE[:-1], 2 * DIM),)),
    "heads before tokens": (head_major, lambda: (noise(2, PAGES, KV_HEADS, PAGE, DIM),)),
    "bytes seen as fp8": (bytes_as_fp8, lambda: (noise(*CACHE, dtype=torch.uint8), noise(*CACHE, dtype=torch.uint8))),
    "a pool of layers": (pool_of_layers, lambda: (noise(2, 2, *CACHE),)),
}
