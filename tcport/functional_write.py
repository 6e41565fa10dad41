"""Mutating operators as a functional graph holds them: one node that takes base tensors and returns their new versions.

Functionalisation turns ``op(x, cache[0])`` into ``auto_functionalized_v2(op, x=x, _cache_base_index=0, <view>,
_all_bases=[cache])``, whose results are those of ``op`` (one None if it has none) followed by each base as it is after
the write. How the argument is made from its base is spelled out in keyword arguments: a slice, an ``as_strided`` with
offsets counted from the start of the storage, an alias, or nothing where the argument is the base itself.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from tcport.pass_values import fake_mode

_VIEW_KEYS = ("base_index", "alias", "slice_dim", "slice_start", "slice_end", "size", "stride", "storage_offset")


@dataclasses.dataclass(frozen=True)
class FunctionalWrite:
    """A node that carries out a mutating operator functionally.

    Attributes:
        node: the graph node. op: the mutating operator's overload.
        bases: the tensors written to, before the write.
    """

    node: torch.fx.Node
    op: Any
    bases: tuple[torch.fx.Node, ...]

    @staticmethod
    def of(node: torch.fx.Node, *ops: Any) -> FunctionalWrite | None:
        """The write a node stands for, if it is the functional form of one of ``ops`` (or of any, without them)."""
        if node.op != "call_function" or node.target is not torch.ops.higher_order.auto_functionalized_v2:
            return None
        op, bases = node.args[0], node.kwargs.get("_all_bases") or ()
        if ops and op not in ops:
            return None
        return FunctionalWrite(node, op, tuple(bases))  # type: ignore[arg-type]

    @property
    def num_results(self) -> int:
        """Results before the first base: those of the operator, or one None."""
        return max(1, len(self.op._schema.returns))

    def new_base(self, index: int) -> torch.fx.Node | None:
        """The node that takes out a base as it is after the write; None where nobody does."""
        return self.result(self.num_results + index)

    def result(self, number: int) -> torch.fx.Node | None:
        """The node that takes out a result by its number."""
        for user in self.node.users:
            if user.target is operator.getitem and user.args[1] == number:
                return user
        return None

    def base_index(self, name: str) -> int:
        """Which base a mutated argument is a view of."""
        return self.node.kwargs[f"_{name}_base_index"]  # type: ignore[return-value]

    def view_arguments(self) -> dict[str, Any]:
        """The keyword arguments that say how mutated arguments are made from the bases, the bases included."""
        names = [f"_{name}_{key}" for name in self.mutated for key in _VIEW_KEYS]
        return {key: value for key, value in self.node.kwargs.items() if key in names or key == "_all_bases"}

    def plain_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the operator that it does not write to."""
        views = self.view_arguments()
        return {key: value for key, value in self.node.kwargs.items() if key not in views}

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments the operator writes to."""
        return tuple(a.name for a in self.op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)

    def view(self, name: str, bases: Sequence[Any], call: Callable[..., Any]) -> Any:
        """A mutated argument, made from given bases.

        Args:
            bases: tensors, or graph nodes.
            call: ``call(overload, *args)`` runs an operator, or adds a node that does.
        """
        kwargs, aten = self.node.kwargs, torch.ops.aten
        base = bases[self.base_index(name)]
        if f"_{name}_alias" in kwargs:
            return call(aten.alias.default, base)
        if f"_{name}_slice_dim" in kwargs:
            return call(aten.slice.Tensor, base, *(kwargs[f"_{name}_slice_{key}"] for key in ("dim", "start", "end")))
        if f"_{name}_storage_offset" in kwargs:
            place = (kwargs[f"_{name}_{key}"] for key in ("size", "stride", "storage_offset"))
            return call(aten.as_strided.default, base, *place)
        return base

    def counts_from_storage(self, name: str) -> bool:
        """Whether the argument is made with offsets counted from the start of its base's storage."""
        return f"_{name}_storage_offset" in self.node.kwargs

    def call_values(self) -> dict[str, Any]:
        """The operator's keyword arguments as the fake values of the nodes behind them."""
        values = torch.fx.map_arg(self.plain_arguments(), lambda n: n.meta["val"])
        bases = [base.meta["val"] for base in self.bases]
        with fake_mode(self.node.graph):
            return values | {name: self.view(name, bases, _run) for name in self.mutated}


def is_view(node: torch.fx.Node) -> bool:
    """Whether a node's result may share the memory of its first argument, by the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.returns:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def memory_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory a node's result lies in: itself, or what it is a view of."""
    while True:
        if is_view(node):
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is operator.getitem and is_view(node.args[0]):  # type: ignore[arg-type]
            node = node.args[0].args[0]  # type: ignore[union-attr, assignment]
        else:
            return node


def aliases_of(memory: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes whose results lie in the memory of a node, which comes first: those that :func:`memory_of` leads to it.

    Found by the users, as graphs have many nodes and a memory has few views.
    """
    found = [memory]
    for node in found:
        parts = is_view(node)
        found += [
            user
            for user in node.users
            if (is_view(user) and user.args[0] is node) or (parts and user.target is operator.getitem)
        ]
    return found


def written_by(cache: torch.fx.Node) -> FunctionalWrite | None:
    """The ``kv_write`` whose new version of a base this is a view of."""
    base = memory_of(cache)
    if base.target is not operator.getitem:
        return None
    write = FunctionalWrite.of(base.args[0], torch.ops.tcport.kv_write.default)  # type: ignore[arg-type]
    return write if write is not None and base.args[1] >= write.num_results else None  # type: ignore[operator]


def named_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Every argument of the node's operator by name, its defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    positional = dict(zip((argument.name for argument in schema), node.args, strict=False))
    return {a.name: node.kwargs.get(a.name, positional.get(a.name, a.default_value)) for a in schema}


def _run(overload: Any, *args: Any) -> Any:
    return overload(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
