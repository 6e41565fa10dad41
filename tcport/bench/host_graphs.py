"""The graphs whose host time is taken, and plain graphs beside them that take as many tensors and launch as much."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tcport import eager, ops  # noqa: F401  (eager binds the operators)

Graph = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A graph to be timed.

    Attributes:
        backend: what compiles it. tokens: query tokens of a sequence; None: one, by decode.
        layered: it takes a list of pairs of caches and has a layer for each.
    """

    name: str
    graph: Graph
    backend: str = "tcport"
    tokens: int | None = None
    layered: bool = False

    def inputs(self, device: str, layers: int = 1) -> list[Any]:
        """Query, key, value, K cache, V cache (or ``layers`` pairs of caches), slots, block table, lengths, bounds."""
        new, caches, places = _inputs(device, self.tokens, layers)
        return [*new, caches, *places] if self.layered else [*new, *caches[0], *places]


def attend(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    return ops.paged_attention(q, kc, vc, table, lens, bounds)


def write_and_attend(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    ops.kv_write(k, v, kc, vc, slots)
    return ops.paged_attention(q, kc, vc, table, lens, bounds)


def eight_times(q: Any, *rest: Any) -> Any:
    for _ in range(8):
        q = write_and_attend(q, *rest)
    return q


def plain(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    """One kernel that takes the same number of tensors as :func:`attend`."""
    return q + kc[0, 0, 0] + vc[0, 0, 0] + table[0, 0] + lens[0]


def plain_write(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    """As :func:`write_and_attend`: it writes to both caches."""
    kc[0, 0] = k[0] + slots[0]
    vc[0, 0] = v[0]
    return q + table[0, 0] + lens[0]


def layers(q: Any, k: Any, v: Any, caches: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    for kc, vc in caches:
        q = write_and_attend(q, k, v, kc, vc, slots, table, lens, bounds)
    return q


def plain_layers(q: Any, k: Any, v: Any, caches: Any, slots: Any, table: Any, lens: Any, bounds: Any) -> Any:
    """As :func:`layers`, with two kernels of the user's for a layer, or on a CPU two operators of the user's."""
    for kc, vc in caches:
        if q.is_cuda:
            _store_kernel[(k.shape[0],)](k, v, kc, vc, slots, NUMBERS=k[0].numel())
            out = torch.empty_like(q)
            pages = table.shape[1]
            _read_kernel[(q.shape[0],)](q, kc, vc, table, lens, out, pages, NUMBERS=q[0].numel(), PAGE=kc[0].numel())
            q = out
        else:
            torch.ops.tcport_bench.store(k, v, kc, vc, slots)
            q = torch.ops.tcport_bench.read(q, kc, vc, table, lens)
    return q


SUBJECTS: Sequence[Subject] = (
    Subject("attention", attend),
    Subject("write and attention", write_and_attend),
    Subject("8 times write and attention", eight_times),
    Subject("attention of a prompt", attend, tokens=64),
    Subject("plain graph", plain, "inductor"),
    Subject("plain graph that writes", plain_write, "inductor"),
    Subject("layers of attention", layers, layered=True),
    Subject("layers of plain kernels", plain_layers, "inductor", layered=True),
)
KNOWN = ("attention", "plain graph")
"""Those that are compiled for known sizes as well, as all that are layered are."""


@triton.jit
def _store_kernel(k, v, kc, vc, slots, NUMBERS: tl.constexpr):
    token = tl.program_id(0)
    here, there = token * NUMBERS, tl.load(slots + token) * NUMBERS
    number = tl.arange(0, NUMBERS)
    tl.store(kc + there + number, tl.load(k + here + number))
    tl.store(vc + there + number, tl.load(v + here + number))


@triton.jit
def _read_kernel(q, kc, vc, table, lens, out, pages, NUMBERS: tl.constexpr, PAGE: tl.constexpr):
    token = tl.program_id(0)
    page = tl.load(table + token * pages) * PAGE
    number = token * NUMBERS + tl.arange(0, NUMBERS)
    tl.store(out + number, tl.load(q + number) + tl.load(kc + page) + tl.load(vc + page) + tl.load(lens + token))


def _store(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, slots: Tensor) -> None:
    for new, cache in ((k, kc), (v, vc)):
        cache.flatten(0, 1)[slots] = new


def _read(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    page = table[:, 0]
    return q + (kc[page, 0, 0, 0] + vc[page, 0, 0, 0] + lens)[:, None, None]


_LIBRARY = torch.library.Library("tcport_bench", "FRAGMENT")
_LIBRARY.define("store(Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, Tensor slots) -> ()")
_LIBRARY.define("read(Tensor q, Tensor kc, Tensor vc, Tensor table, Tensor lens) -> Tensor")
_LIBRARY.impl("store", _store, "CPU")
_LIBRARY.impl("read", _read, "CPU")
_LIBRARY.impl("store", lambda *tensors: None, "Meta")
_LIBRARY.impl("read", lambda q, *tensors: torch.empty_like(q), "Meta")


def _inputs(device: str, tokens: int | None, layers: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Of an 8B model, on a CPU of a toy; batch and table width equal no other size, which would not stay open."""
    batch, width, heads, kv_heads, dim, page = (12, 40, 32, 8, 128, 16) if device == "cuda" else (3, 5, 8, 2, 32, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    total = batch * (tokens or 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    table = torch.arange(batch * width, device=device).view(batch, width).int()
    lens = torch.full((batch,), width * page - 1, device=device).int()
    slots = torch.arange(total, device=device)
    bounds = None if tokens is None else (torch.arange(batch + 1, device=device) * tokens).int()
    caches = [tuple(random(batch * width, page, kv_heads, dim) for _ in "kv") for _ in range(layers)]
    new = [random(total, count, dim) for count in (heads, kv_heads, kv_heads)]
    return new, caches, [slots, table, lens, bounds]
