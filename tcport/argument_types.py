"""Which Python types the public functions take, looked at before an operator or a kernel sees an argument.

torch checks an operator's schema itself, in words that say neither what is allowed nor what to do, and that Dynamo
hides. Here a wrong type is a value and no exception, which Dynamo traces like any other: the functions then call
``tcport::refuse_type``, and the error reaches the caller of eager and of compiled code in the same words.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcport.errors import ArgumentError


class _Kind(NamedTuple):
    types: tuple[type, ...]
    said: str
    remedy: str


_INTEGER = (numbers.Integral, torch.SymInt)
_NUMBER = (numbers.Real, torch.SymInt, torch.SymFloat)
_NONE = type(None)
_TO_TENSOR = "Make it a tensor on the device of the others, with torch.tensor(...)."
_TO_NUMBER = "Pass a Python number; a tensor's is .item(), read outside compiled code."

_tensor = _Kind((Tensor,), "a tensor", _TO_TENSOR)
_tensor_or_none = _Kind((Tensor, _NONE), "a tensor, or None to leave it out", _TO_TENSOR)
_integer = _Kind(_INTEGER, "an integer", _TO_NUMBER)
_integer_or_none = _Kind((*_INTEGER, _NONE), "an integer, or None to leave it out", _TO_NUMBER)
_number_or_none = _Kind((*_NUMBER, _NONE), "a number, or None for the default", _TO_NUMBER)
_flag = _Kind((bool, torch.SymBool), "True or False", "Pass one of the two; it is fixed when code is compiled.")
_kv_scale = _Kind((Tensor, *_NUMBER, _NONE), "a tensor, a number, or None to leave it out", _TO_TENSOR)

_KINDS = {
    **dict.fromkeys(("query", "k_cache", "v_cache", "block_table", "seq_lens"), _tensor),
    **dict.fromkeys(("key", "value", "slot_mapping", "out_a", "lse_a", "out_b", "lse_b"), _tensor),
    **dict.fromkeys(("cu_seqlens_q", "alibi_slopes", "sinks", "mask", "out"), _tensor_or_none),
    **dict.fromkeys(("k_scale", "v_scale"), _kv_scale),
    **dict.fromkeys(("window", "chunk", "num_splits"), _integer_or_none),
    **dict.fromkeys(("causal", "batch_invariant", "return_lse"), _flag),
    "scale": _number_or_none,
    "softcap": _Kind(_NUMBER, "a number, 0.0 for none", _TO_NUMBER),
    "shared_pages": _integer,
}


def wrong_type(**arguments: Any) -> tuple[str, str] | None:
    """Cause and remedy of the first argument of a type that its name does not allow; None if all are right.

    A bool is an integer to Python, and to nobody who passes it as a window or a scale.
    """
    types = (*arguments, *map(type, arguments.values()))
    if torch.compiler.is_compiling():
        return wrong_among(types)  # Dynamo must not guard on what is remembered
    if types in _right:
        return None
    right = [isinstance(value, _KINDS[name].types) for name, value in arguments.items()]
    wrong = _wrong(types, right)
    if wrong is None and len(_right) < _MOST and wrong_among(types) is None:
        _right.add(types)
    return wrong


def wrong_among(types: tuple[Any, ...]) -> tuple[str, str] | None:
    """What :func:`wrong_type` says where types are all that is known: the names, and then the types of their values.

    Types decide it alone, and Dynamo guards on those that the graph was traced with, so one look is enough
    (``torch.compiler.assume_constant_result``). Traced, it was some eighty guards, which each call pays for.
    """
    names, given = types[: len(types) // 2], types[len(types) // 2 :]
    return _wrong(types, [issubclass(of, _KINDS[name].types) for name, of in zip(names, given, strict=True)])


def _wrong(types: tuple[Any, ...], right: Sequence[bool]) -> tuple[str, str] | None:
    for name, given, fits in zip(types, types[len(right) :], right, strict=False):
        kind = _KINDS[name]
        if not fits or (given is bool and kind is not _flag):
            said = "a tensor" if issubclass(given, Tensor) else f"of type {given.__name__}"
            return f"{name} is {said}; allowed: {kind.said}.", kind.remedy
    return None


_MOST = 1024
_right: set[tuple[Any, ...]] = set()
"""Names of arguments and types of their values that are right, whatever the values."""


def refuse_type(cause: str, remedy: str) -> None:
    """Raise what :func:`wrong_type` found.

    Raises:
        ArgumentError: always.
    """
    raise ArgumentError(cause, remedy)


def stand_in(query: Any, v_cache: Any, return_lse: Any) -> Any:
    """A result for Dynamo to go on with after a refusal; no code that holds it ever runs."""
    if not (isinstance(query, Tensor) and isinstance(v_cache, Tensor) and query.dim() == 3 and v_cache.dim() == 4):
        out = torch.empty(1, 1, 1)
    else:
        out = query.new_empty(query.shape[0], query.shape[1], v_cache.shape[3])
    return (out, out[..., 0].float()) if return_lse else out
