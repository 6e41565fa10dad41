"""Whether what was timed is right: a sample of its results against fp32, over an output full of NaN."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from tcport.bench.inputs import Inputs
from tcport.errors import TcportError

TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest error of a result, as a part of the largest result of its row."""
SEQUENCES, TOKENS = 3, 8


class WrongResultError(TcportError):
    """A timed call gave wrong numbers; its time says nothing."""


def check(inputs: Inputs, out: Tensor | None = None, sampled: Sampled | None = None) -> float:
    """The largest error of sampled rows of ``out [T, Hq, Dv]``; of a write, of all that was written.

    Args:
        sampled: :func:`sample` of the inputs, where many results are compared with it.

    Raises:
        WrongResultError: when it is beyond :data:`TOLERANCE`, or not finite.
    """
    case = inputs.case
    error = _write_error(inputs) if out is None else _attention_error(sampled or sample(inputs), out)
    if not error <= TOLERANCE[case.dtype]:
        raise WrongResultError(
            f"{case.name}: results are off by {error:.3g} where {TOLERANCE[case.dtype]:g} is allowed.",
            "Report it with this case; its time is not printed.",
        )
    return error


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Rows of a result, and what they must be: ``expected [rows, Hq, Dv]`` in fp32."""

    rows: Tensor
    expected: Tensor


def sample(inputs: Inputs) -> Sampled:
    """Attention in fp32 of a few tokens of a few sequences."""
    case, arguments = inputs.case, inputs.arguments
    q_lens = case.q_lens or (1,) * len(case.lens)
    starts = [0, *itertools.accumulate(q_lens)]
    rows, expected = [], []
    for sequence in sorted({round(i * (len(case.lens) - 1) / (SEQUENCES - 1)) for i in range(SEQUENCES)}):
        length, q_len = case.lens[sequence], q_lens[sequence]
        keys, values = (_rows(arguments[name], arguments["block_table"][sequence], length) for name in CACHES)
        for token in sorted({round(i * (q_len - 1) / (TOKENS - 1)) for i in range(TOKENS)}):
            row = starts[sequence] + token
            visible = length - q_len + token + 1
            rows.append(row)
            expected.append(_attend(arguments["query"][row].float(), keys[:visible], values[:visible]))
    return Sampled(torch.tensor(rows, device=arguments["query"].device), torch.stack(expected))


def _attention_error(sampled: Sampled, out: Tensor) -> float:
    errors = (out[sampled.rows].float() - sampled.expected).abs().flatten(1).amax(1)
    error = (errors / sampled.expected.abs().flatten(1).amax(1)).max().item()
    return error if error == error else float("inf")


CACHES = ("k_cache", "v_cache")


def _rows(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Keys or values of one sequence: ``[length, Hkv, D]`` in fp32."""
    wanted = pages[: -(-length // cache.shape[1])].long()
    raw = cache.view(torch.uint8)[wanted].view(cache.dtype) if cache.dtype.itemsize == 1 else cache[wanted]
    return raw.flatten(0, 1)[:length].float()


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    group = query.shape[0] // keys.shape[1]
    grouped = query.view(keys.shape[1], group, -1)
    scores = torch.einsum("hgd,lhd->hgl", grouped, keys) * query.shape[-1] ** -0.5
    return torch.einsum("hgl,lhv->hgv", scores.softmax(-1), values).flatten(0, 1)


def _write_error(inputs: Inputs) -> float:
    worst = 0.0
    for name in CACHES:
        cache: Any = inputs.arguments[name]
        source = inputs.arguments["key" if name == "k_cache" else "value"]
        stored = cache.flatten(0, 1)[inputs.arguments["slot_mapping"].long()].float()
        worst = max(worst, _distance(stored, source.to(cache.dtype).float()))
    return worst


def _distance(actual: Tensor, expected: Tensor) -> float:
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    return error if error == error else float("inf")
