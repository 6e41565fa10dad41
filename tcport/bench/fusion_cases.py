"""The comparisons of ``bench --suite fusions``: norm, rotation and write; a matmul of 4-bit weights; norm and quantise.

Shapes are those of an 8B model: 32 query and 8 KV heads of 128, width 4096, inner width 14336, bf16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tcport.bench.fusions import Fusion, Peer
from tcport.device import device_profile
from tcport.kernels import int4, quantise
from tcport.kernels.call import WriteCall
from tcport.kernels.rope import RopeWriteCall, rotated
from tcport.lowering.operators import ROPE_AND_WRITE, Operator, choose, device_of, foreign_operator

DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
BATCHES = (1, 2, 4, 8, 16)
LARGER = (32, 64, 256, 4096)
"""Rows at which a matmul of 4-bit weights is held against a dequantise and a matmul."""


def fusions() -> list[Fusion]:
    """All comparisons, in the order in which they are printed."""
    products = [int4_matmul(rows, 4096, width) for width in (4096, 14336) for rows in (*BATCHES, *LARGER)]
    products += [int4_matmul(rows, 14336, 4096) for rows in (*BATCHES, int4.MOST_ROWS)]
    norms = [norm_quantise(16384, 4096, by_row) for by_row in (False, True)]
    return [*map(rope_write, (64, 512, 8192)), *products, *norms]


def first_kernel(operator: Operator, arguments: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], Any]:
    """What the chain names first for an operator on the first inputs it meets; PyTorch is compiled, as in a graph.

    Args:
        arguments: from a set of inputs to the operator's.
    """
    chosen: list[Callable[..., Any]] = []

    def run(inputs: Any) -> Any:
        given = arguments(inputs)
        if not chosen:
            call = operator.call(*given)
            candidate = choose(operator, call, device_profile(device_of(call))).selection.candidates[0]
            launch = torch.compile if candidate.tier == "torch" else lambda run, dynamic: run
            chosen.append(launch(lambda *a: candidate.run(operator.call(*a), lambda kernel: kernel), dynamic=False))
        return chosen[0](*given)

    return run


@functools.cache
def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(run, dynamic=False)


def rope_write(tokens: int, heads: tuple[int, int] = (32, 8), dim: int = 128, page: int = 16) -> Fusion:
    """Norm and rotation of query and key, and their write, as Qwen3 has them."""
    parts = {"query": heads[0], "key": heads[1], "value": heads[1]}

    def make(device: torch.device) -> RopeWriteCall:
        qkv = _random(tokens, sum(parts.values()), dim, device=device)  # one projection, as models make it
        query, key, value = qkv.split(tuple(parts.values()), 1)
        pages = 2 * -(-tokens // page)
        k_cache, v_cache = (_random(pages, page, heads[1], dim, device=device) for _ in "kv")
        slots = torch.randperm(pages * page, device=device)[:tokens]
        angles = torch.outer(torch.arange(tokens, device=device), 0.9 ** torch.arange(dim // 2, device=device))
        tables = (f(angles).repeat(1, 2).to(DTYPE) for f in (torch.cos, torch.sin))
        weights = (torch.rand(dim, device=device).to(DTYPE) + 0.5 for _ in "qk")
        return RopeWriteCall(query, WriteCall(key, value, k_cache, v_cache, slots), *tables, *weights, eps=1e-6)

    def results(call: RopeWriteCall, out: Tensor) -> Sequence[Tensor]:
        return out, *(cache.flatten(0, 1)[call.write.slot_mapping] for cache in (call.k_cache, call.v_cache))

    def expected(call: RopeWriteCall) -> Sequence[Tensor]:
        return *rotated(_wide(call)), call.write.value

    return Fusion(
        f"norm, rotation and write, {tokens} tokens",
        make,
        _fused_rope_write,
        {"Inductor": Peer(_inductor_rope_write, goal=2.0)},
        results,
        expected,
        moved=tokens * dim * DTYPE.itemsize * 2 * sum(parts.values()),
        held=tokens * dim * DTYPE.itemsize * 2 * sum(parts.values()),
        tolerance=2e-2,
    )


def _fused_rope_write(call: RopeWriteCall) -> Tensor:
    candidate = choose(ROPE_AND_WRITE, call, device_profile(device_of(call))).selection.candidates[0]
    return candidate.run(call, lambda kernel: kernel)


def _wide(call: RopeWriteCall) -> RopeWriteCall:
    write = dataclasses.replace(call.write, key=call.write.key.float())
    return dataclasses.replace(call, query=call.query.float(), write=write)


def _rope_write(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, cos: Tensor,
    sin: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """As models spell it, in their dtype."""

    def turn(x: Tensor, weight: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    page, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[page, offset] = turn(key, k_weight)
    v_cache[page, offset] = value
    return turn(query, q_weight)


def _inductor_rope_write(call: RopeWriteCall) -> Tensor:
    write = call.write
    caches = (write.k_cache, write.v_cache, write.slot_mapping)
    tables = (call.cos, call.sin, call.q_weight, call.k_weight, call.eps)
    return _compiled(_rope_write)(call.query, write.key, write.value, *caches, *tables)


@dataclasses.dataclass(frozen=True)
class Int4Inputs:
    """A matmul of 4-bit weights: ``x [T, K]``, the operator's weights, and ``dense [N, K]``, the same in 16 bits."""

    x: Tensor
    packed: Tensor
    scales: Tensor
    zeros: Tensor
    dense: Tensor


def int4_matmul(rows: int, depth: int, width: int, group: int = 128) -> Fusion:
    """Groups of 128 weights, as the checkpoints of most models have."""
    operator = foreign_operator("tcport::w4a16_matmul")

    def make(device: torch.device) -> Int4Inputs:
        packed = torch.randint(-(2**31), 2**31, (depth // int4.PER_WORD, width), device=device, dtype=torch.int32)
        scales = torch.rand(depth // group, width, device=device).to(DTYPE) * 0.02 + 0.002
        zeros = torch.randint(0, 16, (depth // group, width), device=device, dtype=torch.int32)
        dense = int4.dequantised(packed, scales, zeros).t().contiguous()
        return Int4Inputs(_random(rows, depth, device=device), packed, scales, zeros, dense)

    def arguments(inputs: Int4Inputs) -> tuple[Tensor, ...]:
        return inputs.x, inputs.packed, inputs.scales, inputs.zeros

    def unfused(inputs: Int4Inputs) -> Tensor:
        return inputs.x @ _compiled(int4.dequantised)(inputs.packed, inputs.scales, inputs.zeros)

    few = rows <= max(BATCHES)
    weights = depth * width // 2 + (depth // group) * width * (DTYPE.itemsize + 4)
    return Fusion(
        f"4-bit matmul, {rows} rows, {depth} x {width}",
        make,
        first_kernel(operator, arguments),
        {
            "bf16 matmul": Peer(lambda inputs: linear(inputs.x, inputs.dense), goal=2.5 if few else None),
            "dequantise + matmul": Peer(unfused, goal=1.0),
        },
        lambda inputs, out: (out,),
        lambda inputs: (inputs.x.float() @ inputs.dense.t().float(),),
        moved=weights + rows * (depth + width) * DTYPE.itemsize,
        held=weights,
        tolerance=2e-2,
    )


@dataclasses.dataclass(frozen=True)
class NormInputs:
    """A norm and its quantise; ``scale`` None: a scale per row. ``source`` is copied to ``target`` as a yardstick."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    scale: Tensor | None
    source: Tensor
    target: Tensor


def norm_quantise(rows: int, width: int, by_row: bool) -> Fusion:
    """Residual sum, norm and quantise to fp8, beside a copy that moves as many bytes."""
    operator = foreign_operator("tcport::add_rms_norm_quantise")
    moved = rows * width * (3 * DTYPE.itemsize + FP8.itemsize)

    def make(device: torch.device) -> NormInputs:
        scale = None if by_row else torch.full((1,), 0.02, device=device)
        x, residual = (_random(rows, width, device=device) for _ in range(2))
        copied = (torch.zeros(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
        return NormInputs(x, residual, torch.rand(width, device=device).to(DTYPE) + 0.5, scale, *copied)

    def arguments(inputs: NormInputs) -> tuple[Any, ...]:
        return inputs.x, inputs.residual, inputs.weight, 1e-6, inputs.scale, FP8

    def unfused(inputs: NormInputs) -> Sequence[Tensor]:
        return _compiled(quantise.add_rms_norm_quantise)(*arguments(inputs))

    def results(inputs: NormInputs, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        total, codes, scales = returned
        return total, codes.float() * (scales if inputs.scale is None else inputs.scale)

    def expected(inputs: NormInputs) -> Sequence[Tensor]:
        total = inputs.x.float() + inputs.residual.float()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * inputs.weight.float()
        limit = float("inf") if inputs.scale is None else quantise.LIMITS[FP8] * float(inputs.scale)
        return total, normed.clamp(-limit, limit)

    return Fusion(
        f"sum, norm and quantise by {'row' if by_row else 'tensor'}, {rows} x {width}",
        make,
        first_kernel(operator, arguments),
        {
            "copy": Peer(lambda inputs: inputs.target.copy_(inputs.source), goal=0.85, checked=False),
            "Inductor": Peer(unfused),
        },
        results,
        expected,
        moved=moved,
        held=moved,
        tolerance=5e-2,
    )


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(DTYPE)
