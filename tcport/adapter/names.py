"""What a node calls, under one name for all the ways in which PyTorch and Dynamo spell it."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

OpOverload = type(torch.ops.aten.view.default)
OpOverloadPacket = type(torch.ops.aten.view)
"""The classes of ``torch.ops.<namespace>.<op>[.<overload>]``, which have no public names."""

_INPLACE = {
    f"i{name}": name
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "matmul")
}
_SAME = {
    **_INPLACE,
    **{f"r{name}": name for name in ("add", "mul", "and", "or", "xor")},
    "numpy_T": "T",
    "matrix_H": "adjoint",
    "H": "adjoint",
    "_get_data_attr": "detach",
}


def op_name(node: Node) -> str | None:
    """The PyTorch operation a node calls, with in-place and operator spellings folded; None for anything else.

    ``x.add_(y)``, ``x += y``, ``x.__radd__(y)``, ``torch.add(x, y)`` and ``aten.add.Tensor(x, y)`` are all ``add``.
    """
    name = str(node.target) if node.op == "call_method" else function_name(node)
    if name is None:
        return None
    bare = name.strip("_") if name.startswith("__") else name.rstrip("_")
    return _SAME.get(bare, bare)


def function_name(node: Node) -> str | None:
    """The name of the PyTorch or operator function that a ``call_function`` node calls; None for any other callable."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target.name().removeprefix("aten::").partition(".")[0] if target.namespace == "aten" else None
    name = getattr(target, "__name__", "")
    if isinstance(target, OpOverloadPacket):
        return name if getattr(torch.ops.aten, name, None) is target else None
    if target is getattr:  # x.mT, x.T
        return str(node.args[1])
    known = target is abs or any(getattr(m, name, None) is target for m in (operator, torch, F, torch.special))
    if known or (name == "_get_data_attr" and target.__module__ == "torch._C._autograd"):  # x.data
        return name
    return None
