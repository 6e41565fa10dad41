"""Kernels and tiles that a model would get on an absent GPU: ``python examples/inspect_any_gpu.py mi300x``."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import tcport
from tcport.device.catalog import catalogue, catalogue_profile
from tcport.testing import lower_on


def decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> object:
    return tcport.paged_attention(query, k_cache, v_cache, block_table, seq_lens)


def main(names: list[str]) -> None:
    query = torch.empty(32, 32, 128, dtype=torch.bfloat16)
    caches = [torch.empty(256, 16, 8, 128, dtype=torch.bfloat16) for _ in "kv"]
    table, lens = torch.zeros(32, 128, dtype=torch.int32), torch.ones(32, dtype=torch.int32)
    for name in names or catalogue():
        for node in lower_on(catalogue_profile(name), decode, query, *caches, table, lens):
            print(f"{name}: {node.op} -> {node.kernel} [{node.tier}] {node.tile}")


if __name__ == "__main__":
    main(sys.argv[1:])
