"""fuse_rope_write: query-key norm, rotary embedding and cache write of a layer as one operator.

Rules:
    1. Where a ``kv_write`` and the ``paged_attention`` that reads it have a rotated key and a rotated query, rotations
       and write become ``tcport::rope_and_write``. The spellings are those of :mod:`tcport.passes.rope_patterns`; query
       and key may be rotated as one tensor.
    2. Between a rotation and its use there may be views that keep heads whole.
    3. Both are rotated by the same tables, which are the same for every head.
    4. Norms right before both rotations are taken in, where they have one epsilon and no other users.
    5. Where a rotated tensor has other users, or what is rotated needs the write, everything stays as it is; what only
       stands after the write, as Inductor may order it, is moved before it.

Saves: of query and key, the load and store before the write; of compiled code, a kernel a layer.

Requires: the functional form of the write. Runs before ``merge_kv_write``, which takes the writes that are left.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tcport import rope_op as rope_op  # defines the operator
from tcport.effects import has_effect, writes_in_place
from tcport.functional_write import FunctionalWrite, is_view, named_arguments, written_by
from tcport.graph_facts import has_values
from tcport.graph_pass import PassContext, register_pass
from tcport.pass_values import derive
from tcport.passes.rope_patterns import COMPLEX, HALVES, NORM, PAIRS
from tcport.pattern import Pattern
from tcport.pattern_match import Found, outside_user

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten.reshape.default,  # what Inductor makes of a view
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
)


@dataclasses.dataclass(frozen=True)
class _Side:
    """A query or key, from what a part computes to its use.

    Attributes:
        part: the rotation or norm. pattern: which of them. views: from its result to the use, last first.
    """

    part: Found
    pattern: Pattern
    views: tuple[torch.fx.Node, ...]

    @property
    def source(self) -> torch.fx.Node:
        return self.part.bindings.nodes["x"]


@register_pass(
    name="fuse_rope_write",
    before=("merge_kv_write", "fuse_add_rms_norm", "select_tiles"),
    requires=(has_values,),
    params=(HALVES, PAIRS, COMPLEX, NORM),
)
def fuse_rope_write(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """Fuse every layer's rotation and write; returns their number."""
    matches = 0
    for attention in graph.find_nodes(op="call_function", target=torch.ops.tcport.paged_attention.default):
        arguments = named_arguments(attention)
        write = written_by(arguments["k_cache"])
        if write is None:
            continue
        query, key = (_behind(node, HALVES, PAIRS, COMPLEX) for node in (arguments["query"], write.node.kwargs["key"]))
        if query is None and key is None:
            continue
        reason = _obstacle(write, attention, query, key) or _fuse(graph, write, attention, query, key, ctx)
        if reason is not None:
            ctx.leave(attention, reason)
            continue
        matches += 1
    return matches


def _behind(node: Any, *patterns: Pattern) -> _Side | str | None:
    """The part behind a node and views of it; why there is none although it looks so; None: nothing of the kind."""
    views: list[torch.fx.Node] = []
    while isinstance(node, torch.fx.Node):
        for pattern in patterns:
            found = pattern.find(node)
            if isinstance(found, Found):
                return _Side(found, pattern, tuple(views))
            if found is not None:
                return found
        if not _keeps_heads(node):
            return None
        views.append(node)
        node = node.args[0]
    return None


def _keeps_heads(view: torch.fx.Node) -> bool:
    """Whether a view moves whole rows of the last dimension."""
    if view.target not in _VIEWS or not (is_view(view) or view.target is operator.getitem):
        return False
    values = [n.meta.get("val") for n in (view.args[0], view)]  # type: ignore[union-attr]
    tensors = [t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,))]
    if not all(isinstance(t, torch.Tensor) and t.dim() for t in tensors):
        return False
    (size, stride), *others = ((t.shape[-1], t.stride(-1)) for t in tensors)  # sizes that are open have no hash
    return all(statically_known_true(a == size) and statically_known_true(b == stride) for a, b in others)


def _obstacle(
    write: FunctionalWrite, attention: torch.fx.Node, query: _Side | str | None, key: _Side | str | None
) -> str | None:
    """Why rotations and write stay apart; None where they need not."""
    for what, side in (("query", query), ("key", key)):
        if side is None:
            return f"its {what} is not rotated and the other one is"
        if isinstance(side, str):
            return f"its {what}: {side}"
    assert isinstance(query, _Side)
    assert isinstance(key, _Side)
    if query.pattern is not key.pattern or not all(
        _alike(query.part.bindings.nodes[name], key.part.bindings.nodes[name]) for name in _tables(key)
    ):
        return "query and key are rotated by different tables"
    order = {node: number for number, node in enumerate(write.node.graph.nodes)}
    for side in (query, key):
        if (user := outside_user(side.part.bindings.root, (write.node, attention))) is not None:
            return f"{user.name} uses the rotated {side.part.bindings.root.name} too"
        if order[side.source] > order[write.node] and _late(side.source, write, order) is None:
            return f"{side.source.name} is computed after {write.node.name}"
    dtypes = {side.source.meta["val"].dtype for side in (query, key)}
    return None if len(dtypes) == 1 else "query and key have different dtypes"


def _late(source: torch.fx.Node, write: FunctionalWrite, order: dict[torch.fx.Node, int]) -> list[torch.fx.Node] | None:
    """What a tensor needs that stands after a write, in order; None where that needs the write, or has an effect."""
    late, open_ = set(), [source]
    while open_:
        node = open_.pop()
        if node is write.node or (order[node] > order[write.node] and has_effect(node)):
            return None
        if order[node] > order[write.node] and node not in late:
            late.add(node)
            open_ += node.all_input_nodes
    between = (node for node, at in order.items() if order[write.node] < at < order[source])
    return None if any(map(writes_in_place, between)) else sorted(late, key=order.__getitem__)


def _tables(side: _Side) -> tuple[str, ...]:
    return ("freqs",) if side.pattern is COMPLEX else ("cos", "sin")


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are one: the same node, or the same view of it made twice."""
    if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node):
        same = is_view(a) and a.target is b.target and len(a.args) == len(b.args) and a.kwargs == b.kwargs
        return a is b or (same and all(map(_alike, a.args, b.args)))
    return not isinstance(a, torch.fx.Node) and not isinstance(b, torch.fx.Node) and a == b


def _norms(query: _Side, key: _Side) -> tuple[_Side, _Side] | None:
    """The norms before both rotations, where they can be taken in."""
    norms = tuple(_behind(side.source, NORM) for side in (query, key))
    if not all(isinstance(norm, _Side) for norm in norms):
        return None
    for norm, side in zip(norms, (query, key), strict=True):
        if outside_user(norm.part.bindings.root, side.part.inner) is not None:  # type: ignore[union-attr]
            return None
    eps = {norm.part.bindings.nodes["eps"] for norm in norms}  # type: ignore[union-attr]
    return norms if len(eps) == 1 else None  # type: ignore[return-value]


def _fuse(
    graph: torch.fx.Graph, write: FunctionalWrite, attention: torch.fx.Node, query: Any, key: Any, ctx: PassContext
) -> str | None:
    """Put the fused operator in the place of the write; the reason where the tables cannot be had a row a token."""
    made: list[torch.fx.Node] = []

    def call(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        made.append(node)
        node.meta["val"] = derive(node)
        return node

    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in _late(query.source, write, order) or ():
        write.node.prepend(node)
    norms = _norms(query, key)
    chains = [(norms[i] if norms else None, side) for i, side in enumerate((query, key))]
    with graph.inserting_before(write.node):
        try:
            rows = [_moved((norm or side).source, norm, side, call) for norm, side in chains]
            cos, sin = (_table(table, key, call) for table in _cos_and_sin(key, call))
        except (RuntimeError, ValueError) as error:
            _erase(made)
            return f"its views cannot be made of the unrotated tensors: {error}"
        if cos is None or sin is None:
            _erase(made)
            return "the tables differ from head to head"
        options: dict[str, Any] = {"interleaved": key.pattern is not HALVES, "q_weight": None, "k_weight": None}
        if norms is not None:
            bound = [norm.part.bindings.nodes for norm in norms]
            options |= {"q_weight": bound[0]["weight"], "k_weight": bound[1]["weight"], "eps": bound[0]["eps"]}
        plain = {**write.plain_arguments(), "query": rows[0], "key": rows[1], "cos": cos, "sin": sin}
        fused = graph.call_function(
            torch.ops.higher_order.auto_functionalized_v2,
            (torch.ops.tcport.rope_and_write.default,),
            {"eps": 0.0, **plain, **options, **write.view_arguments()},
        )
        fused.meta["val"] = derive(fused)
        out = call(operator.getitem, fused, 0)
        for index in range(len(write.bases)):
            if (old := write.new_base(index)) is not None:
                old.replace_all_uses_with(call(operator.getitem, fused, 1 + index))
                graph.erase_node(old)
    attention.replace_input_with(named_arguments(attention)["query"], out)
    ctx.merged(write.node, fused)
    graph.erase_node(write.node)
    sides = [side for pair in chains for side in pair if side is not None]
    inner = dict.fromkeys(node for side in sides for node in side.part.inner)
    for side in sides:
        operations, values = side.part.saving()
        ctx.saved(operations, values)
    gone = [side.part.bindings.root.meta["val"] for side in sides if side is not query]
    ctx.saved(len(sides), gone)  # the last operation of each side goes as well: the fused one is the write there was
    ctx.note(f"{len(inner)} operations and a write became one{' with the norms' if norms else ''}")
    _erase([*inner, *(view for side in sides for view in side.views)])
    return None


def _moved(x: torch.fx.Node, norm: _Side | None, side: _Side, call: Any) -> torch.fx.Node:
    """What a rotated tensor's use would see of the tensor before norm and rotation."""
    for view in (*reversed(norm.views if norm else ()), *reversed(side.views)):
        x = call(view.target, x, *view.args[1:])
    return x


def _cos_and_sin(key: _Side, call: Any) -> tuple[torch.fx.Node, torch.fx.Node]:
    nodes = key.part.bindings.nodes
    if key.pattern is not COMPLEX:
        return nodes["cos"], nodes["sin"]
    parts = call(aten.view_as_real.default, nodes["freqs"])
    return call(aten.select.int, parts, -1, 0), call(aten.select.int, parts, -1, 1)


def _table(table: torch.fx.Node, key: _Side, call: Any) -> torch.fx.Node | None:
    """A table of angles as one row a token; None where heads have rows of their own."""
    x, width = key.source, table.meta["val"].shape[-1]
    sizes = [
        size if isinstance(size, int) else call(aten.sym_size.int, x, at)
        for at, size in enumerate(x.meta["val"].shape[:-1])
    ]
    table = call(aten.expand.default, table, [*sizes, width])
    for view in reversed(key.views):
        args = list(view.args[1:])
        if view.target in (aten.view.default, aten.reshape.default) and args[0][-1] != -1:  # type: ignore[index]
            args = [[*args[0][:-1], width]]  # type: ignore[index]
        table = call(view.target, table, *args)
    value = table.meta["val"]
    if value.dim() != 3 or (value.shape[1] != 1 and value.stride(1) != 0):
        return None
    return call(aten.select.int, table, 1, 0)


def _erase(nodes: Sequence[torch.fx.Node]) -> None:
    """Erase those of some nodes that nothing uses, users first."""
    if not nodes:
        return
    wanted = set(nodes)
    for node in reversed(list(nodes[0].graph.nodes)):
        if node in wanted and all(user.target is operator.getitem and not user.users for user in node.users):
            for user in list(node.users):
                node.graph.erase_node(user)
            node.graph.erase_node(node)
