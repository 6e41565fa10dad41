"""Fake values of graph nodes: derived anew from an operator and its arguments, and compared."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

_DERIVED = "tcport_derived"


@dataclasses.dataclass(frozen=True)
class _Derived:
    """A derived value, and everything that it was derived from."""

    given: tuple[Any, ...]
    value: Any

    def stands_for(self, given: tuple[Any, ...]) -> bool:
        return len(given) == len(self.given) and all(a is b for a, b in zip(given, self.given, strict=True))


def derive(node: torch.fx.Node, key: str = "val") -> Any:
    """What a node computes, as a fake value; None where that cannot be told from its operator and arguments alone.

    A node that is as it was when it was last asked about has the value it had, until :func:`forget_derived`.

    Raises:
        Exception: whatever the operator raises on these arguments.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    inputs = node.all_input_nodes
    if any(key not in argument.meta for argument in inputs):
        return None
    if node.op == "call_function" and not _is_derivable(node):
        return None
    known = node.meta.get(_DERIVED)
    if known is not None and known.stands_for(_given(node, key)):
        return known.value
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta[key])
    with fake_mode(node.graph, key):
        if node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
    note_derived(node, value, key)
    return value


def note_derived(node: torch.fx.Node, value: Any, key: str = "val") -> None:
    """Say what :func:`derive` would derive for a node, where that is known."""
    node.meta[_DERIVED] = _Derived(_given(node, key), value)


def forget_derived(graph: torch.fx.Graph) -> None:
    """Let every value be derived anew, and leave no trace in a graph that others go on with."""
    for node in graph.nodes:
        node.meta.pop(_DERIVED, None)


def _given(node: torch.fx.Node, key: str) -> tuple[Any, ...]:
    """What decides a node's value; a node's arguments are a new tuple whenever they change."""
    return (key, node.target, node.args, node.kwargs, *(argument.meta.get(key) for argument in node.all_input_nodes))


@contextlib.contextmanager
def fake_mode(graph: torch.fx.Graph, key: str = "val") -> Iterator[None]:
    """The mode the graph's fake tensors live in; new data-dependent sizes made in it belong to nobody."""
    values = (node.meta.get(key) for node in graph.nodes)
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    if mode is None:
        yield
        return
    fresh = contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    with torch.no_grad(), mode, fresh:
        yield


def agree(stated: Any, derived: Any) -> bool:
    """Whether two fake values have the same structure, and its tensors the same shape, strides, dtype and device.

    Sizes that depend on data are named anew whenever they are derived: they agree with everything.
    """
    if isinstance(stated, torch.Tensor) and isinstance(derived, torch.Tensor):
        if (stated.dtype, stated.device, stated.dim()) != (derived.dtype, derived.device, derived.dim()):
            return False
        if stated.layout != torch.strided or derived.layout != torch.strided:
            return stated.layout == derived.layout and all(map(_same_size, stated.shape, derived.shape))
        if not all(map(_same_size, stated.shape, derived.shape)):
            return False
        # A stride over a dimension of size 1, or of an empty tensor, places nothing.
        return any(_is(size, 0) for size in stated.shape) or all(
            _is(size, 1) or _same_size(a, b)
            for size, a, b in zip(stated.shape, stated.stride(), derived.stride(), strict=True)
        )
    if isinstance(stated, (tuple, list)) and isinstance(derived, (tuple, list)):
        return len(stated) == len(derived) and all(map(agree, stated, derived))
    if isinstance(stated, (int, torch.SymInt)) and isinstance(derived, (int, torch.SymInt)):
        return _same_size(stated, derived)
    return isinstance(stated, torch.Tensor) == isinstance(derived, torch.Tensor)


def facts(value: Any) -> str:
    """Shape, strides, dtype and device of the tensors in a value, as text; equal for values that are alike."""
    if isinstance(value, torch.Tensor):
        strides = list(value.stride()) if value.layout == torch.strided else value.layout
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {strides} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(facts, value))})"
    return str(value) if isinstance(value, (int, float, torch.SymInt)) else type(value).__name__


def _is_derivable(node: torch.fx.Node) -> bool:
    """Operators of any kind and Python's own; not arbitrary functions, which a Dynamo graph may hold."""
    module = getattr(node.target, "__module__", "") or ""
    return module.partition(".")[0] in ("torch", "tcport", "_operator", "math")


def _same_size(a: Any, b: Any) -> bool:
    if free_unbacked_symbols(a) or free_unbacked_symbols(b):
        return True
    return bool(statically_known_true(a == b))


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number
