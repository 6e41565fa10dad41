"""Contractions of two tensors, whatever they are called: matmul, bmm, einsum, a product and its sum."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import sympy
from torch.fx import Node

from tcport.adapter.algebra import Expr
from tcport.adapter.names import op_name
from tcport.adapter.sizes import shape_of, size_expr, tensor_of

if TYPE_CHECKING:
    from tcport.adapter.reader import Reader, Ref


@dataclasses.dataclass(frozen=True)
class Contraction:
    """``sum over index of left * right``, at one element of the result.

    Attributes:
        node: the node that computes it.
        left, right: the two factors; their coordinates use ``indices``.
        indices: the coordinates summed over; usually one, more for an einsum over split dimensions.
    """

    node: Node
    left: Ref
    right: Ref
    indices: tuple[Expr, ...]


def contraction_of(reader: Reader, ref: Ref) -> Contraction | None:
    """The contraction that computes the element, or None."""
    return reader.apply(_CONTRACTIONS, ref)


def is_contraction(node: Node) -> bool:
    """Whether a node is of a kind that :func:`contraction_of` reads."""
    return tensor_of(node) is not None and op_name(node) in _CONTRACTIONS


def _matmul(reader: Reader, ref: Ref, input: Node, other: Node) -> Contraction | None:
    left, right = shape_of(input), shape_of(other)
    if len(left) == 0 or len(right) == 0:
        return None
    out = list(ref.coords)
    column = out.pop() if len(right) > 1 else None
    row = out.pop() if len(left) > 1 else None
    index = reader.space.symbol("d", left[-1])
    batch = tuple(out)

    def aligned(shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
        own = shape[:-2]
        return tuple(
            sympy.Integer(0) if size == 1 else c for size, c in zip(own, batch[len(batch) - len(own) :], strict=True)
        )

    left_coords = (*aligned(left), row, index) if row is not None else (index,)
    right_coords = (*aligned(right), index, column) if column is not None else (index,)
    return _contraction(reader, ref, input, left_coords, other, right_coords, (index,))


def _linear(reader: Reader, ref: Ref, input: Node, weight: Node, bias: Any = None) -> Contraction | None:
    if bias is not None:
        return None
    index = reader.space.symbol("d", shape_of(input)[-1])
    *rest, column = ref.coords
    return _contraction(reader, ref, input, (*rest, index), weight, (column, index)[-len(shape_of(weight)) :], (index,))


def _baddbmm(
    reader: Reader, ref: Ref, input: Node, batch1: Node, batch2: Node, *, beta: Any = 1, alpha: Any = 1
) -> Contraction | None:
    return _matmul(reader, ref, batch1, batch2) if beta == 0 and alpha == 1 else None


def _einsum(reader: Reader, ref: Ref, equation: Any, *operands: Any) -> Contraction | None:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = sorted(set(inputs) - {","})
        output = "".join(c for c in letters if inputs.count(c) == 1)
    if len(terms) != 2 or any(len(set(term)) != len(term) for term in (*terms, output)):
        return None
    sizes: dict[str, Expr] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, shape_of(operand), strict=True):
            if sizes.get(letter, sympy.Integer(1)) == 1:
                sizes[letter] = size
    at: dict[str, Expr] = dict(zip(output, ref.coords, strict=True))
    summed = [letter for letter in sizes if letter not in at]
    if not summed or any(letter not in terms[0] or letter not in terms[1] for letter in summed):
        return None
    at |= {letter: reader.space.symbol(letter, sizes[letter]) for letter in summed}
    coords = [
        tuple(
            sympy.Integer(0) if size == 1 else at[letter] for letter, size in zip(term, shape_of(operand), strict=True)
        )
        for term, operand in zip(terms, operands, strict=True)
    ]
    return _contraction(
        reader, ref, operands[0], coords[0], operands[1], coords[1], tuple(at[letter] for letter in summed)
    )


def _sum(reader: Reader, ref: Ref, input: Node, dim: Any = None, keepdim: bool = False, **_: Any) -> Contraction | None:
    """``(a * b).sum(dim)``."""
    if isinstance(dim, list | tuple):
        dim = dim[0] if len(dim) == 1 else None
    shape = shape_of(input)
    if not isinstance(dim, int) or isinstance(dim, bool):
        return None
    dim = dim % len(shape)
    index = reader.space.symbol("d", shape[dim])
    coords = (*ref.coords[:dim], index, *ref.coords[dim + (1 if keepdim else 0) :])
    product = reader.resolve(reader.ref(input, coords, ref.time))
    pair = reader.apply({"mul": _factors, "multiply": _factors}, product)
    if pair is None:
        return None
    left, right = pair
    return Contraction(ref.node, left, right, (index,))


def _factors(reader: Reader, ref: Ref, input: Any, other: Any) -> tuple[Ref, Ref] | None:
    if not all(isinstance(x, Node) and tensor_of(x) is not None for x in (input, other)):
        return None
    return reader.broadcast(input, ref), reader.broadcast(other, ref)


def _contraction(
    reader: Reader,
    ref: Ref,
    left: Node,
    left_coords: tuple[Expr, ...],
    right: Node,
    right_coords: tuple[Expr, ...],
    indices: tuple[Expr, ...],
) -> Contraction:
    return Contraction(
        ref.node,
        reader.ref(left, left_coords, ref.time),
        reader.ref(right, right_coords, ref.time),
        tuple(index for index in indices if index != size_expr(0)),
    )


_CONTRACTIONS = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _matmul),
    "linear": _linear,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    "sum": _sum,
}
