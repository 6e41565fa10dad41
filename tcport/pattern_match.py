"""A match: whether it may be replaced, and the replacement put in its place."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tcport.effects import has_effect, returns_nothing, writes_in_place
from tcport.no_ops import passes_on
from tcport.pass_values import note_derived
from tcport.pattern import FLOATING, Bindings, Pattern


@dataclasses.dataclass(frozen=True)
class Found:
    """A match: the nodes of its results, the last one its root, and all nodes it takes the place of."""

    bindings: Bindings
    outputs: tuple[torch.fx.Node, ...]
    inner: tuple[torch.fx.Node, ...]

    def saving(self, also: Sequence[torch.fx.Node] = ()) -> tuple[int, list[torch.Tensor]]:
        """What one operator in the place of the match saves, as :meth:`tcport.graph_pass.PassContext.saved` takes it.

        Args:
            also: values outside the match that are no longer stored either.
        """
        computed = [node for node in self.inner if not passes_on(node) and node.target is not operator.getitem]
        gone = dict.fromkeys((*(node for node in computed if node not in self.outputs), *also))
        values = [node.meta.get("val") for node in gone]
        return len(computed) - 1 + len(also), [value for value in values if isinstance(value, torch.Tensor)]

    def erase(self) -> None:
        """Erase the parts of the match that nothing uses any more, and the views between them."""
        _erase_unused(self.inner)


def misfit(pattern: Pattern, bindings: Bindings) -> str | None:
    """How dtypes or named dimensions of what wildcards stand for contradict them."""
    sizes: dict[str, Any] = {}
    shared: dict[torch.dtype, str] = {}
    for name, wildcard in pattern.wildcards.items():
        if wildcard.dims is None:
            continue
        value = bindings[name]
        allowed = wildcard.dtypes or FLOATING
        if value.dtype not in allowed:
            return f"{name} is {_dtype(value.dtype)}, not {' or '.join(map(_dtype, allowed))}"
        if not wildcard.dtypes:
            shared.setdefault(value.dtype, name)
        named = [dim for dim in wildcard.dims if dim not in ("...", "*")]
        if value.dim() < len(named) or (value.dim() > len(named) and len(named) == len(wildcard.dims)):
            return f"{name} has {value.dim()} dimensions, not {' '.join(wildcard.dims)!r}"
        rest = value.dim() - len(named)
        shape = dict(zip(named, value.shape[rest:], strict=True))
        if "..." in wildcard.dims:
            shape["..."] = list(value.shape[:rest])
        for given, size in shape.items():
            factor, dim = multiple(given)
            if factor > 1 and not statically_known_true(size % factor == 0):
                return f"{name} has {given}={size}"
            size = size // factor if factor > 1 else size
            if not _is_same(sizes.setdefault(dim, size), size):
                return f"{name} has {dim}={size}, another wildcard {sizes[dim]}"
    if len(shared) > 1:
        return " but ".join(f"{name} is {_dtype(dtype)}" for dtype, name in shared.items())
    return None


def multiple(dim: str) -> tuple[int, str]:
    """``"2d"`` as ``(2, "d")``."""
    name = dim.lstrip("0123456789")
    return int(dim.removesuffix(name) or 1), name


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(statically_known_true(a == b))


def used_elsewhere(found: Found) -> str | None:
    place = {node: number for number, node in enumerate(found.bindings.root.graph.nodes)}
    for node in found.inner:
        user = outside_user(node, found.inner)
        if user is None or node is found.bindings.root:
            continue
        if node not in found.outputs:
            return f"{user.name} uses {node.name}, which would no longer be computed"
        if place[user] < place[found.bindings.root]:
            return f"{user.name} uses {node.name} before the last part of the match"
    return None


def outside_user(node: torch.fx.Node, inner: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """A user that is no part of the match, behind views of it if need be."""
    for user in node.users:
        if user in inner or _is_dead(user):
            continue
        if not passes_on(user):
            return user
        if (behind := outside_user(user, inner)) is not None:
            return behind
    return None


def written_between(found: Found) -> str | None:
    inside = False
    for node in found.bindings.root.graph.nodes:
        if node is found.bindings.root:
            return None
        inside = inside or node in found.inner
        if inside and writes_in_place(node):
            return f"{node.name} writes to memory between its parts"
    return None


def results(replacement: torch.fx.GraphModule) -> Sequence[torch.fx.Node]:
    """The nodes that a traced replacement returns."""
    returned: Any = next(iter(replacement.graph.find_nodes(op="output"))).args[0]
    return returned if isinstance(returned, (tuple, list)) else (returned,)


def values_of(replacement: torch.fx.GraphModule, inputs: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, Any]:
    """The fake values of a traced replacement's nodes for these inputs: those they have, or new ones."""
    values: dict[torch.fx.Node, Any] = {}
    given = iter(inputs)
    for node in replacement.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given).meta["val"]
        elif "val" in node.meta:
            values[node] = node.meta["val"]
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


def insert(
    replacement: torch.fx.GraphModule,
    inputs: Sequence[torch.fx.Node],
    found: Found,
    values: Mapping[torch.fx.Node, Any],
) -> None:
    """Put a traced replacement before the root of a match, and erase what nothing uses any more.

    Args:
        inputs: what stands for the replacement's placeholders. values: of its nodes, from :func:`values_of`.
    """
    graph = found.bindings.root.graph
    stand_ins: dict[torch.fx.Node, Any] = {}
    with graph.inserting_before(found.bindings.root):
        given = iter(inputs)
        for node in replacement.graph.nodes:
            if node.op == "placeholder":
                stand_ins[node] = next(given)
            elif node.op == "call_function":
                stand_ins[node] = new = graph.node_copy(node, stand_ins.__getitem__)
                new.meta["val"] = values[node]
                note_derived(new, values[node])
    for old, new in zip(found.outputs, results(replacement), strict=True):
        old.replace_all_uses_with(stand_ins[new], delete_user_cb=lambda user: user not in found.inner)
    found.erase()


def _erase_unused(nodes: Sequence[torch.fx.Node]) -> None:
    """Erase the parts of a match, last first, and the views between them."""
    order = {node: number for number, node in enumerate(nodes[0].graph.nodes)}
    for node in sorted(nodes, key=order.__getitem__, reverse=True):
        _erase_with_views(node)


def _erase_with_views(node: torch.fx.Node) -> None:
    for user in list(node.users):
        if passes_on(user) or _is_dead(user):
            _erase_with_views(user)
    if not node.users and not node._erased:
        node.graph.erase_node(node)


def _is_dead(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and not node.users and not has_effect(node) and not returns_nothing(node)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
