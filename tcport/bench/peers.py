"""What people run instead, on the same inputs: other ways to paged attention that this environment has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tcport.bench.cases import Case
from tcport.bench.inputs import Inputs

MOST_GATHERED_BYTES = 2e10


@dataclasses.dataclass(frozen=True)
class Peer:
    """One of them.

    Attributes:
        refuses: why it cannot run a case, or "".
        prepare: what it needs for one set of inputs and may keep; not timed.
        run: the timed call; of a write, the caches hold the result.
    """

    refuses: Callable[[Case], str]
    prepare: Callable[[Inputs], Any]
    run: Callable[[Inputs, Any], Tensor | None]


def _uniform(case: Case) -> str:
    if case.kind == "write":
        return "attends only"
    if len(set(case.lens)) > 1 or len(set(case.q_lens or (1,))) > 1:
        return "takes sequences of one length only"
    if case.kv_dtype != case.dtype:
        return "takes a cache of the query's dtype only"
    return "" if case.kv_bytes <= MOST_GATHERED_BYTES else "the gathered cache does not fit"


def _gather_and_sdpa(inputs: Inputs, mask: Tensor | None) -> Tensor:
    arguments, case = inputs.arguments, inputs.case
    table = arguments["block_table"]
    keys, values = (
        arguments[name][table].flatten(1, 2)[:, : case.lens[0]].transpose(1, 2) for name in ("k_cache", "v_cache")
    )
    query = arguments["query"].unflatten(0, (len(case.lens), -1)).transpose(1, 2)
    causal = mask is None and query.shape[2] > 1
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _mask_of(inputs: Inputs) -> Tensor | None:
    """Causality from the last key back, where ``is_causal`` would count from the first."""
    case = inputs.case
    queries, keys = (case.q_lens or (1,))[0], case.lens[0]
    if queries in (1, keys):
        return None
    rows = torch.arange(keys - queries, keys, device=inputs.arguments["query"].device)
    return torch.arange(keys, device=rows.device) <= rows[:, None]


def _index_put(inputs: Inputs, _: Any) -> None:
    arguments = inputs.arguments
    for name in ("key", "value"):
        cache = arguments[f"{name[0]}_cache"]
        slots = arguments["slot_mapping"].long()
        page, offset = slots // cache.shape[1], slots % cache.shape[1]
        cache[page, offset] = arguments[name].to(cache.dtype)


PEERS: dict[str, Peer] = {
    "gather + SDPA": Peer(_uniform, _mask_of, _gather_and_sdpa),
    "gather + SDPA, compiled": Peer(_uniform, _mask_of, torch.compile(_gather_and_sdpa)),
    "index_put": Peer(lambda case: "" if case.kind == "write" else "writes only", lambda inputs: None, _index_put),
}
