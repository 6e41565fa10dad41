"""The tensors of a case, several times over: together larger than the L2 cache, with pages in random order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from tcport.bench.cases import Case

ROTATED_BYTES = 4e8
"""Several times the L2 cache of any GPU of today."""
MOST_COPIES = 16


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of one call: of ``tcport.paged_attention``, or of ``tcport.kv_write`` for a write."""

    case: Case
    arguments: dict[str, Any]


def make_inputs(case: Case, device: torch.device | str = "cuda", copies: int | None = None) -> list[Inputs]:
    """``copies`` independent sets of tensors; None: as many as it takes to leave the L2 cache."""
    make = _write if case.kind == "write" else _attention
    return [Inputs(case, make(case, torch.device(device))) for _ in range(copies or copies_of(case))]


def copies_of(case: Case, memory: float = 2e10) -> int:
    """How many sets of tensors leave the L2 cache, as far as ``memory`` bytes of KV caches allow."""
    copies = max(2, min(MOST_COPIES, round(ROTATED_BYTES / case.kv_bytes + 0.5)))
    return min(copies, max(1, int(memory // case.kv_bytes)))


def _attention(case: Case, device: torch.device) -> dict[str, Any]:
    counts = [-(-n // case.page) for n in case.lens]
    k_cache, v_cache = _caches(case, sum(counts), device)
    pages = torch.randperm(sum(counts), device=device).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, (start, count) in enumerate(zip(itertools.accumulate([0, *counts]), counts, strict=False)):
        table[row, :count] = pages[start : start + count]
    q_lens = case.q_lens or (1,) * len(case.lens)
    arguments: dict[str, Any] = {
        "query": _random(sum(q_lens), case.heads[0], case.dims[0], device=device).to(getattr(torch, case.dtype)),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table,
        "seq_lens": torch.tensor(case.lens, dtype=torch.int32, device=device),
    }
    if case.q_lens is not None:
        starts = [0, *itertools.accumulate(case.q_lens)]
        arguments["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32, device=device)
    return arguments


def _write(case: Case, device: torch.device) -> dict[str, Any]:
    (tokens,) = case.lens
    k_cache, v_cache = _caches(case, 2 * -(-tokens // case.page), device)
    dtype = getattr(torch, case.dtype)
    arguments: dict[str, Any] = {
        "key": _random(tokens, case.heads[1], case.dims[0], device=device).to(dtype),
        "value": _random(tokens, case.heads[1], case.dims[1], device=device).to(dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.randperm(k_cache.shape[0] * case.page, device=device)[:tokens].int(),
    }
    return arguments


def _caches(case: Case, pages: int, device: torch.device) -> tuple[Tensor, Tensor]:
    dtype = getattr(torch, case.kv_dtype)
    k_cache, v_cache = (_random(pages, case.page, case.heads[1], dim, device=device).to(dtype) for dim in case.dims)
    return k_cache, v_cache


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
