"""Which nodes share memory, which nodes write it, and when two views of one memory cannot touch."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from tcport.adapter.algebra import Expr, divided
from tcport.adapter.names import OpOverload, OpOverloadPacket, function_name
from tcport.adapter.sizes import leaves, size_expr

_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift"),
        *("isub", "itruediv", "ixor", "setitem", "delitem"),
    )
)
_INPLACE_METHODS = frozenset({"__setitem__", *(f"__{op.__name__}__" for op in _INPLACE_OPERATORS)})


def storages(node: Node) -> frozenset[int]:
    """Identities of the memory a node's value lies in.

    Fake tensors keep the aliasing of what they stand for: a view, an in-place result, and two graph inputs that were
    views of one tensor all share a storage.
    """
    held = leaves(node.meta.get("example_value"))
    return frozenset(StorageWeakRef(leaf.untyped_storage()).cdata for leaf in held if isinstance(leaf, Tensor))


def aliases(a: Node, b: Node) -> bool:
    """Whether two nodes share memory."""
    return not storages(a).isdisjoint(storages(b))


def mutated(node: Node) -> list[Node]:
    """The arguments whose memory a node may change; every tensor argument, for a callable that is not known."""
    if node.op == "call_method":
        name = str(node.target)
        if name in _INPLACE_METHODS or (name.endswith("_") and not name.endswith("__")):
            return _first(node)
        return _nodes(node.kwargs.get("out"))
    if node.op == "call_module":
        return _tensors(node)
    if node.op != "call_function":
        return []
    target: Any = node.target
    if target in _INPLACE_OPERATORS:
        return _first(node)
    if isinstance(target, OpOverload):
        return _mutated_by_schema(node, [target])
    if isinstance(target, OpOverloadPacket):
        return _mutated_by_schema(node, [getattr(target, name) for name in target.overloads()])
    name = function_name(node)
    if name is None:
        return _tensors(node)
    marked = name.endswith("_") and not name.endswith("__") and target.__module__ != "_operator"  # and_, or_, not_
    if marked or _asks_inplace(node, target):
        return _first(node)
    return _nodes(node.kwargs.get("out"))


def is_mutation(node: Node) -> bool:
    """Whether a node may change memory it did not allocate."""
    return bool(mutated(node))


def disjoint(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage certainly share no element.

    Understood: one lies wholly after the other (the halves of a stacked pool), or they interleave along their largest
    stride, each period holding a stretch of one and then a stretch of the other (``[pages, 2, ...]`` unbound).
    """
    if a.dtype.itemsize != b.dtype.itemsize:
        return False
    first, second = _Extent(a), _Extent(b)
    return any(x.before(y) or x.interleaves(y) for x, y in ((first, second), (second, first)))


def reach(changed: Node, mutator: Node) -> Tensor:
    """The part of a tensor that a mutation can touch: ``pool[0, 1, page, slot] = x`` stays inside ``pool[0, 1]``."""
    tensor = changed.meta["example_value"]
    if mutator.target is not operator.setitem or mutator.args[0] is not changed:
        return tensor
    for item in mutator.args[1] if isinstance(mutator.args[1], tuple) else (mutator.args[1],):
        if isinstance(item, bool) or not isinstance(item, int):
            break
        tensor = tensor[item]
    return tensor


class _Extent:
    """Start, reach and period of a strided view, in elements."""

    def __init__(self, tensor: Tensor) -> None:
        self.start = tensor.storage_offset()
        self.dims = [
            (size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size_expr(size) != 1
        ]

    def before(self, other: _Extent) -> bool:
        """Whether this view ends before the other begins."""
        return _holds(other.start - self.start >= _reach(self.dims))

    def interleaves(self, other: _Extent) -> bool:
        """Whether each period of the largest stride holds a stretch of this view and then one of the other."""
        mine, theirs = ({_exprs(dim): dim for dim in extent.dims} for extent in (self, other))
        steps = [key[1] for key in (*mine, *theirs)]
        outer = [key for key in mine if key in theirs and all(divided(key[1], step) is not None for step in steps)]
        if not outer:
            return False
        period = mine.pop(outer[0])[1]
        theirs.pop(outer[0])
        gap = other.start - self.start
        return _holds(gap >= _reach(mine.values())) and _holds(period >= gap + _reach(theirs.values()))


def _reach(dims: Iterable[tuple[Any, Any]]) -> Any:
    """Distance from the first element of a strided view to the one behind its last."""
    return sum((size - 1) * stride for size, stride in dims) + 1


def _exprs(dim: tuple[Any, Any]) -> tuple[Expr, Expr]:
    return size_expr(dim[0]), size_expr(dim[1])


def _holds(condition: bool | torch.SymBool) -> bool:
    """Whether a relation of sizes holds: always, or here, under a guard that has the graph compiled anew elsewhere."""
    if isinstance(condition, torch.SymBool):
        return condition.node.has_hint() and bool(condition.node.hint) and bool(condition)
    return condition


def _first(node: Node) -> list[Node]:
    return _nodes(node.args[0] if node.args else next(iter(node.kwargs.values()), None))


def _nodes(value: Any) -> list[Node]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Node)]


def _tensors(node: Node) -> list[Node]:
    return [arg for arg in node.all_input_nodes if storages(arg)]


def _mutated_by_schema(node: Node, overloads: list[Any]) -> list[Node]:
    """Arguments that some overload writes; of a packet it is not known which overload the arguments will pick."""
    found: dict[Node, None] = {}
    for overload in overloads:
        for i, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                positional = i < len(node.args) and not argument.kwarg_only
                found |= dict.fromkeys(_nodes(node.args[i] if positional else node.kwargs.get(argument.name)))
    return list(found)


def _asks_inplace(node: Node, target: Any) -> bool:
    """Whether a functional such as ``F.relu`` or ``F.dropout`` was called with ``inplace=True``."""
    if node.kwargs.get("inplace"):
        return True
    if True not in [arg for arg in node.args if isinstance(arg, bool)]:
        return False
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a builtin without a signature: none of those takes ``inplace``
        return False
    return bool(bound.arguments.get("inplace"))
