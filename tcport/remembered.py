"""Eager calls like one seen before: what was checked of their arguments, and which kernels were chosen for them.

Checks and choices depend on dtypes, sizes, strides, devices and options alone, and on no value of a tensor. A call that
agrees in all of these with one that went well is as right, and takes the same kernels, as long as nothing has changed
that a choice rests on: registered kernels, bundles, failed kernels, what is known of devices. Arguments themselves,
addresses among them, are never kept: each call is built from its own, and a kernel is still asked whether it stands
aside. A call that failed is not remembered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from tcport import debug, quarantine
from tcport.bundle.store import named_folders
from tcport.chain import Chosen
from tcport.device import profile_state
from tcport.kernels.call import share_storage
from tcport.locks import process_lock
from tcport.lowering.registry import generation

MOST = 1024
"""Kinds of calls that are kept; the oldest make room. Decode steps of a server are a few, its prompts of any size."""

Key = tuple[Hashable, Hashable]
"""What held for the whole process, and the facts of one call."""


def recall(operator: str, args: tuple[Any, ...], options: dict[str, Any], k: Any, v: Any) -> tuple[Chosen | None, Any]:
    """The chain of a call, if one like it went well; and what :func:`keep` knows the call by.

    Args:
        args, options: the operator's own, by position and by name.
        k, v: the caches among them: kernels may be chosen by whether V lies within K.
    """
    if debug.is_on():
        return None, None  # values are looked at, each time anew
    table = _table
    state = _state()
    try:
        # Addresses are compared first, as a storage takes longer to get.
        one = k.data_ptr() == v.data_ptr() and k.storage_offset() == v.storage_offset() and share_storage(k, v)
        facts = operator, one, *map(_facts, args), *options, *map(_facts, options.values())
        return table.known.get(facts) if state == table.state else None, (state, facts)
    except (RuntimeError, TypeError):
        return None, None  # no dense tensor, or a size that is open


def keep(key: Key | None, chosen: Chosen) -> None:
    """Remember the chain of a call that went well, unless what it rests on changed meanwhile."""
    global _table
    if key is None or key[0] != _state():
        return
    state, facts = key
    with _lock:
        if state != _table.state:
            _table = _Table(state)
        elif len(_table.known) >= MOST:
            del _table.known[next(iter(_table.known))]
        _table.known[facts] = chosen


def remembered() -> int:
    """How many kinds of calls are kept."""
    return len(_table.known)


@dataclasses.dataclass(frozen=True)
class _Table:
    """What is known, as long as a certain state lasts."""

    state: Hashable
    known: dict[Hashable, Chosen] = dataclasses.field(default_factory=dict)


_lock = process_lock()
_table = _Table(None)


def _state() -> Hashable:
    return generation(), named_folders(), quarantine.version(), profile_state()


def _facts(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.shape, value.stride(), value.device, value.layout
