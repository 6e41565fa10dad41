"""How Inductor lowers a node of tcport's: it is traced, and the trace is lowered in its place.

The layers of a model ask for the same few traces again and again, so each is made once a compile.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.fx
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.lowering import process_subgraph_nodes
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from tcport._inductor.in_place import with_safe_writes
from tcport._inductor.race import Race, winner

Emit = Callable[[torch.fx.Node], "Emission | Race"]


@dataclasses.dataclass(frozen=True)
class Emission:
    """How to lower one node.

    Attributes:
        run: the node's arguments to its results; traced, so it may use torch operations and wrapped Triton kernels.
        exact_strides: the traced code reads strides, so each tensor must really have those of its fake tensor.
        alike: what ``run`` is, beside the operator: where it is one and the same object, equal arguments are traced
            once. None: each node is traced.
        notes: lists that ``run`` writes to while it is traced; filled with the same where a trace is used again.
        failed: told what is raised by Inductor, which cannot lower the trace, or where the trace is made.
    """

    run: Callable[..., Any]
    exact_strides: bool
    alike: object = None
    notes: tuple[list[Any], ...] = ()
    failed: Callable[[Exception], None] = lambda error: None


class Traces:
    """Makes the lowerings of one compile; those of equal nodes share a trace."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[torch.fx.GraphModule, Emission]] = {}
        self._names = (f"_tcport_attribute{number}" for number in itertools.count())

    def lowering(self, emit: Emit) -> Callable[..., Any]:
        """A lowering that traces what ``emit`` says and lowers the trace in place of the node."""

        def lower(*args: Any, **kwargs: Any) -> Any:
            node = V.graph.current_node
            emission = emit(node)
            if isinstance(emission, Race):
                emission = winner(emission)()
            leaves, _ = tree_flatten((node.args, node.kwargs))
            lowered, _ = tree_flatten((args, kwargs))
            holes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
            inputs = [lowered[i] for i in holes]
            if emission.exact_strides:
                inputs = [_with_strides(lowered[i], leaves[i].meta["val"]) for i in holes]
            try:
                traced = self._trace(node, emission)
                for name, value in _attributes(traced):
                    setattr(V.graph.module, name, value)  # lowering looks for them there
                return process_subgraph_nodes(traced, inputs) or None
            except Exception as error:
                emission.failed(error)
                raise

        return lower

    def _trace(self, node: torch.fx.Node, emission: Emission) -> torch.fx.GraphModule:
        if emission.alike is None:
            return self._traced(node, emission)
        # The object is kept with the trace, so that its id stays its own.
        key = (node.target, id(emission.alike), _facts((node.args, node.kwargs, node.meta.get("val")), {}, {}))
        try:
            made = self._made.get(key)
        except TypeError:  # an argument that cannot be compared
            return self._traced(node, emission)
        if made is None:
            traced = self._traced(node, emission)
            if not _has_unbacked_sizes(traced):
                self._made[key] = traced, emission
            return traced
        traced, first = made
        for own, others in zip(emission.notes, first.notes, strict=True):
            own[:] = others
        return _copied(traced)

    def _traced(self, node: torch.fx.Node, emission: Emission) -> torch.fx.GraphModule:
        traced = _traced(node, emission)
        replace_random_passes(traced)  # Inductor has done so to the graph, before its operators are lowered
        for get in traced.graph.find_nodes(op="get_attr"):
            name = next(self._names)  # tensors made from numbers, and subgraphs, have the same names in every trace
            setattr(traced, name, getattr(traced, get.target))
            get.target = name
        return traced


def has_code_for(target: object) -> bool:
    """Whether Inductor calls a function as it is when it generates code, as it does with those of its own passes."""
    return hasattr(target, "_inductor_lowering_function")


def _traced(node: torch.fx.Node, emission: Emission) -> torch.fx.GraphModule:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    holes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]

    def run(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(holes, values, strict=True):
            filled[i] = value
        args, kwargs = tree_unflatten(filled, spec)
        results = emission.run(*args, **kwargs)
        return () if results is None else results  # torch 2.11 takes an output of None for a missing output

    def trace(function: Callable[..., Any]) -> torch.fx.GraphModule:
        return make_fx(function, decomposition_table=select_decomp_table())(*_values([leaves[i] for i in holes]))

    with V.fake_mode:
        return with_safe_writes(trace(run), trace)


def _values(nodes: Sequence[torch.fx.Node]) -> list[Any]:
    """The fake values of nodes. Two nodes may have one, where a pass copied it; traced, they would be one argument."""
    owners: dict[int, torch.fx.Node] = {}
    values = []
    for node in nodes:
        value = node.meta["val"]
        shared = isinstance(value, torch.Tensor) and owners.setdefault(id(value), node) is not node
        values.append(torch.ops.aten.alias.default(value) if shared else value)
    return values


def _attributes(traced: torch.fx.GraphModule) -> list[tuple[str, Any]]:
    return [(get.target, getattr(traced, get.target)) for get in traced.graph.find_nodes(op="get_attr")]


def _copied(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The trace with nodes of its own: Inductor lowers a node once."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    return torch.fx.GraphModule(traced, graph)


def _has_unbacked_sizes(traced: torch.fx.GraphModule) -> bool:
    """Whether a trace makes sizes that depend on data (unbacked symbols), of which each node has its own."""
    return any("unbacked_bindings" in node.meta for node in traced.graph.nodes)


def _facts(value: Any, nodes: dict[torch.fx.Node, int], storages: dict[int, int]) -> Hashable:
    """What a trace can see of a node's arguments: equal for those that give equal traces.

    Args:
        nodes, storages: a number for each that was seen, so that arguments that are one tensor, or that share memory,
            differ from arguments that do not.
    """
    if isinstance(value, torch.fx.Node):
        return "node", nodes.setdefault(value, len(nodes)), _facts(value.meta["val"], nodes, storages)
    if isinstance(value, torch.Tensor):
        return _tensor_facts(value, storages)
    if isinstance(value, (list, tuple)):
        return "list", *(_facts(item, nodes, storages) for item in value)
    if isinstance(value, dict):
        return "dict", *((name, _facts(item, nodes, storages)) for name, item in value.items())
    if isinstance(value, slice):
        return "slice", _facts((value.start, value.stop, value.step), nodes, storages)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), value.node.expr
    # 1, 1.0 and True are equal, as are 0.0 and -0.0; their spelling is not.
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _tensor_facts(value: torch.Tensor, storages: dict[int, int]) -> Hashable:
    facts = (type(value), value.dtype, value.device, value.layout, _sizes(value.shape))
    if value.layout != torch.strided:
        return *facts, id(value)
    storage = value.untyped_storage()
    number = storages.setdefault(storage._cdata, len(storages))
    place = _sizes((*value.stride(), value.storage_offset(), storage.nbytes()))
    return *facts, place, number, value.is_conj(), value.is_neg()


def _sizes(sizes: Sequence[int | torch.SymInt]) -> tuple[Any, ...]:
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def _with_strides(value: Any, fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return value
    value.realize()  # else a tensor that only exists as an expression is made a buffer that a write to it would miss
    return ir.ExternKernel.require_exact_strides(value, fake.stride())
