"""What a kernel must give back: tensors of the operator's own number, shapes and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcport.errors import KernelBuildError
from tcport.kernels.call import AttentionCall, MergeCall

Facts = tuple[torch.dtype, tuple[Any, ...]]
"""Dtype and shape of one result."""


def check_call_results(kernel: object, call: Any, results: Any) -> None:
    """Refuse what a kernel returned for a call, where the call alone says what it must be.

    Raises:
        KernelBuildError: see :func:`check_results`.
    """
    if isinstance(call, AttentionCall):
        if _are_attention_s(results, call):
            return
        (*rows, _), dim = call.query.shape, call.v_cache.shape[-1]
        wanted = [(call.query.dtype, (*rows, dim)), (torch.float32, tuple(rows) if call.return_lse else (0,))]
    elif isinstance(call, MergeCall):
        wanted = [_facts(call.out_a), _facts(call.lse_a)]
    else:
        return
    _require(kernel, results, wanted)


def check_results(kernel: object, results: Any, like: Any) -> None:
    """Refuse results that differ from what an operator's fake gave, sizes that are still open left out.

    Raises:
        KernelBuildError: names the kernel, what it returned and what it must return.
    """
    wanted = _tensors(like)
    if wanted is not None:
        _require(kernel, results, [_facts(tensor) for tensor in wanted])


def _are_attention_s(results: Any, call: AttentionCall) -> bool:
    """Whether real tensors are what attention returns, in few steps: every eager call asks."""
    if not isinstance(results, tuple) or len(results) != 2 or type(results[0]) is not Tensor:
        return False
    out, lse = results
    tokens, heads, _ = call.query.shape
    return (
        type(lse) is Tensor
        and out.dtype == call.query.dtype
        and lse.dtype == torch.float32
        and out.shape == (tokens, heads, call.v_cache.shape[3])
        and lse.shape == ((tokens, heads) if call.return_lse else (0,))
    )


def _require(kernel: object, results: Any, wanted: list[Facts]) -> None:
    given = _tensors(results)
    if given is not None and len(given) == len(wanted) and all(map(_agree, map(_facts, given), wanted)):
        return
    said = "no tensors" if given is None else " and ".join(_words(_facts(tensor)) for tensor in given)
    raise KernelBuildError(
        f"{kernel} returned {said}, where its operator returns {' and '.join(map(_words, wanted))}.",
        "Allocate results as the operator's fake does.",
    )


def _agree(given: Facts, wanted: Facts) -> bool:
    """Whether dtypes, ranks and the sizes that are known are the same: comparing open ones would close them."""
    if given[0] != wanted[0] or len(given[1]) != len(wanted[1]):
        return False
    pairs = zip(given[1], wanted[1], strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _tensors(value: Any) -> list[Tensor] | None:
    """A tensor or a sequence of them as a list; None where it is neither."""
    values = [value] if isinstance(value, Tensor) else value
    is_sequence = isinstance(values, (list, tuple)) and all(isinstance(each, Tensor) for each in values)
    return list(values) if is_sequence else None


def _facts(tensor: Tensor) -> Facts:
    return tensor.dtype, tuple(tensor.shape)


def _words(facts: Facts) -> str:
    return f"{str(facts[0]).removeprefix('torch.')}{list(facts[1])}"
