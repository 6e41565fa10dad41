"""Lets an emitted node take the place of another without any user noticing."""

from __future__ import annotations

import torch
from torch.fx import Node

from tcport.adapter.algebra import equal
from tcport.adapter.emit import Emitter
from tcport.adapter.names import op_name
from tcport.adapter.report import Rejected
from tcport.adapter.sizes import shape_of, size_expr, tensor_of


def stand_in(emit: Emitter, result: Node, anchor: Node) -> Node:
    """A node that may take the place of ``anchor``: of its shape and dtype, and of its strides if a user can tell.

    Raises:
        Rejected: shape or dtype differ.
    """
    new, old = tensor_of(result), tensor_of(anchor)
    if new is None or old is None:
        return result
    if new.dtype != old.dtype or new.dim() != old.dim() or not all(map(equal, shape_of(result), shape_of(anchor))):
        raise Rejected(
            "layout", f"the replacement is {new.dtype} {tuple(new.shape)}, not {old.dtype} {tuple(old.shape)}"
        )
    if _same_strides(new, old) or all(_ignores_strides(user) for user in anchor.users):
        return result
    order = sorted(range(old.dim()), key=lambda dim: -_hint(old.stride(dim)))
    dense = emit.call("contiguous", emit.call("permute", result, *order))
    return emit.call("permute", dense, *(order.index(dim) for dim in range(old.dim())))


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether strides agree wherever a dimension has more than one element."""
    return all(
        size_expr(size) == 1 or equal(size_expr(x), size_expr(y))
        for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _ignores_strides(user: Node) -> bool:
    """Whether a use gives the same values and strides whatever the strides of its operand."""
    name = op_name(user)
    if name in ("reshape", "contiguous", "flatten", "matmul", "linear", "size"):
        return user.op == "call_method" or user.target is not torch.Tensor.view
    if name in ("transpose", "permute", "unsqueeze", "squeeze", "getitem", "movedim", "swapaxes"):
        return bool(user.users) and all(_ignores_strides(next_user) for next_user in user.users)
    return False
