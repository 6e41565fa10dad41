"""Which graph nodes have an effect beside their result, in any of the forms a graph passes through."""

from __future__ import annotations

import operator

import torch.fx

_FUNCTIONALISED = (
    "auto_functionalized",
    "auto_functionalized_v2",
    "triton_kernel_wrapper_functional",
    "with_effects",
)
"""Higher-order operators that stand for a write: what is written is among their results."""

_IN_PLACE = (operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)


def has_effect(node: torch.fx.Node) -> bool:
    """Whether a node writes to one of its arguments, functionalised or not."""
    return writes_in_place(node) or writes_functionally(node)


def returns_nothing(node: torch.fx.Node) -> bool:
    """Whether a node calls an operator without results, such as an assertion: it is there for what else it does."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and not schema.returns


def writes_functionally(node: torch.fx.Node) -> bool:
    """Whether a node is the functional form of a write: it is lost when its results are not used."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _FUNCTIONALISED


def writes_in_place(node: torch.fx.Node) -> bool:
    """Whether a node changes the memory of one of its arguments; its place among the other nodes then matters."""
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")  # type: ignore[union-attr]
    if node.op != "call_function":
        return False
    overload = getattr(node.target, "default", node.target)  # Dynamo's graphs may hold a packet of overloads
    schema = getattr(overload, "_schema", None)
    if schema is not None:
        return schema.is_mutable
    name = getattr(node.target, "__name__", "")
    return (
        node.target in _IN_PLACE
        or name == "triton_kernel_wrapper_mutation"
        or bool(node.kwargs.get("inplace"))
        or node.kwargs.get("out") is not None
        or (name.endswith("_") and not name.endswith("__"))
    )
