"""Finding patterns in a graph and replacing them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from tcport._inductor.patterns import Computed, expressions, fresh_fake_mode, mark_computed, python_of, search, trace
from tcport.errors import PatternError
from tcport.graph_pass import PassContext
from tcport.pass_values import agree, facts, fake_mode
from tcport.pattern import FLOATING, Bindings, Guard, Pattern, Wildcard, use_engine
from tcport.pattern_match import Found, insert, misfit, multiple, results, used_elsewhere, values_of, written_between


class InductorEngine:
    """See :class:`tcport.pattern.Engine`."""

    def rewrite(self, pattern: Pattern, graph: torch.fx.Graph, ctx: PassContext) -> int:
        if any("example_value" in node.meta and "val" not in node.meta for node in graph.nodes):
            raise PatternError(
                f"The pattern {pattern.name} is looked for in a graph as Dynamo captured it.",
                "A pattern is ATen operations: register the pass at the stage 'functional' or 'inplace'.",
            )
        count = 0
        present = _dtypes(graph)
        shapes = [s for dtype in pattern.dtypes(present) for s in _shapes(pattern, dtype)]
        for node in reversed(list(graph.nodes)):
            found = None if node._erased else _find(pattern, shapes, node)
            if isinstance(found, Found):
                saving = found.saving()
                found = _replace(pattern, found)
                if found is True:
                    ctx.saved(*saving)
            if isinstance(found, str):
                ctx.leave(node, found)
            count += found is True
        return count

    def find(self, pattern: Pattern, node: torch.fx.Node) -> Found | str | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        dtypes = {value.dtype} if value.dtype in FLOATING else _dtypes(node.graph)
        # 16 bits first: a cast to fp32 is then a part of the match, and not what a wildcard stands for.
        shapes = [s for d in reversed(pattern.dtypes(dtypes)) for s in _shapes(pattern, d)]
        return _find(pattern, shapes, node)

    def python(self, pattern: Pattern, dtype: torch.dtype) -> str:
        sections = []
        wildcards = [f"{name} = {wildcard}" for name, wildcard in pattern.wildcards.items()]
        for spelling, shape in zip(pattern.spellings, _shapes(pattern, dtype), strict=True):
            body = python_of(shape.outputs[-1], spelling.__name__)
            sections.append("\n".join([f"# {spelling.__qualname__}, {_dtype(dtype)}", *wildcards, body, ""]))
        return "\n".join(sections)


use_engine(InductorEngine())


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A spelling traced for one dtype with sizes of no meaning: constants that may be sizes are not compared.

    Attributes:
        outputs: the trees of its results; the last holds the others.
    """

    function: Callable[..., Any]
    outputs: tuple[Any, ...]


def _shapes(pattern: Pattern, dtype: torch.dtype) -> tuple[_Shape, ...]:
    if dtype not in pattern.traced:
        pattern.traced[dtype] = tuple(_shape(pattern, spelling, dtype) for spelling in pattern.spellings)
    return pattern.traced[dtype]


def _shape(pattern: Pattern, spelling: Callable[..., Any], dtype: torch.dtype) -> _Shape:
    names = tuple(inspect.signature(spelling).parameters)
    numbers = {n: 2.0**-20 * (1001 + i) for i, n in enumerate(names) if pattern.wildcards[n].dims is None}
    sizes: dict[str, int] = {}
    with fresh_fake_mode():
        arguments = [numbers.get(n) or _example(pattern.wildcards[n], dtype, sizes) for n in names]
        others = [3 * a if isinstance(a, float) else a for a in arguments]  # shows what is computed from numbers
        try:
            graph = trace(spelling, arguments)
            if numbers:
                mark_computed(graph, trace(spelling, others), set(numbers.values()))
        except Exception as error:
            given = ", ".join(
                f"{n}{list(a.shape)}" for n, a in zip(names, arguments, strict=True) if isinstance(a, torch.Tensor)
            )
            raise PatternError(
                f"The pattern {spelling.__name__} cannot be traced on {given}: {type(error).__name__}: {error}.",
                "Give dimensions that are one size one name, and let the function depend on no values.",
            ) from error
    ignored = (int, list, torch.device, Computed)
    return _Shape(spelling, expressions(graph, names, pattern.wildcards, ignored, numbers, spelling.__name__))


def _example(wildcard: Wildcard, dtype: torch.dtype, sizes: dict[str, int]) -> torch.Tensor:
    """A tensor of the wildcard's rank; sizes are even, for patterns that take halves, and differ."""
    dims = [d for name in wildcard.dims or () for d in (("...0", "...1") if name == "..." else (name,))]
    shape = []
    for name in dims:
        factor, dim = multiple(name)
        shape += [factor * sizes.setdefault(dim, 6 + 4 * len(sizes))] if name != "*" else []
    return torch.empty(shape, dtype=wildcard.dtypes[0] if wildcard.dtypes else dtype)


def _find(pattern: Pattern, shapes: Sequence[_Shape], node: torch.fx.Node) -> Found | str | None:
    """A match at a node; the reason why it is none where it looks like one; None where it does not."""
    reasons = []
    for shape in shapes:
        rough = search(shape.outputs, node)
        if isinstance(rough, str):
            continue
        found = _checked(pattern, shape, dict(rough.kwargs), node)
        if isinstance(found, Found):
            return found
        reasons.append(f"{shape.function.__name__}: {found}" if len(pattern.spellings) > 1 else found)
    return "; ".join(dict.fromkeys(reasons)) or None


def _checked(pattern: Pattern, shape: _Shape, bound: dict[str, Any], root: torch.fx.Node) -> Found | str:
    """A rough match looked at again: with the sizes it has, where its values are used, and by the guards."""
    bindings = Bindings(bound, root)
    unfit = misfit(pattern, bindings)
    if unfit is not None:
        return unfit
    exact = _retraced(pattern, shape, bindings)
    match = search(exact, root)
    if isinstance(match, str):
        return match
    if any(match.kwargs[name] is not node for name, node in bound.items() if isinstance(node, torch.fx.Node)):
        return f"{root.name} matches in two ways"
    outputs = tuple(match.ctx.pattern_to_node[output] for output in exact)
    found = Found(bindings, outputs, tuple(dict.fromkeys(match.nodes)))  # type: ignore[arg-type]
    for check in (used_elsewhere, written_between):
        if (reason := check(found)) is not None:
            return reason
    for guard in pattern.guards:
        if (reason := _asked(guard, pattern, bindings)) is not None:
            return reason
    return found


def _asked(guard: Guard, pattern: Pattern, bindings: Bindings) -> str | None:
    """What a guard says of a match."""
    what = f"The guard {getattr(guard, '__name__', guard)} of the pattern {pattern.name}"
    try:
        reason = guard(bindings)
    except Exception as error:
        raise PatternError(
            f"{what} raised {type(error).__name__}: {str(error).rstrip('.')}.",
            f"Mend it: it is given what matched, by the names {', '.join(bindings.nodes)}.",
        ) from error
    if reason is not None and not isinstance(reason, str):
        raise PatternError(
            f"{what} returned {reason!r}.",
            "Return None where the match is taken, and the reason, a text, where it is not.",
        )
    return reason


def _retraced(pattern: Pattern, shape: _Shape, bindings: Bindings) -> tuple[Any, ...]:
    """A spelling as it is with the sizes, strides and numbers of one match; layers of a model share it."""
    names = tuple(inspect.signature(shape.function).parameters)
    known, key = _known(pattern, bindings, names)
    if (shape.function, key) not in known:
        with fake_mode(bindings.root.graph):
            graph = trace(shape.function, [bindings[name] for name in names])
        known[shape.function, key] = expressions(graph, names, pattern.wildcards, (), {}, shape.function.__name__)
    return known[shape.function, key]


def _replace(pattern: Pattern, found: Found) -> str | bool:
    """Put the replacement in the place of a match: True, or the reason why it does not fit there."""
    bindings, graph = found.bindings, found.bindings.root.graph
    gm = _replacement(pattern, bindings)
    new = results(gm)
    if len(new) != (count := len(found.outputs)):
        raise PatternError(
            f"The replacement of the pattern {pattern.name} returns {len(new)} values, the pattern {count}.",
            "Return the same values in the same order.",
        )
    tensors = [bindings.nodes[name] for name in pattern.order or () if isinstance(bindings[name], torch.Tensor)]
    with fake_mode(graph):
        values = values_of(gm, tensors)
    for old, made in zip(found.outputs, new, strict=True):
        was, now = old.meta["val"], values.get(made)
        if not agree(was, now):
            return f"the replacement gives {facts(now)} for {facts(was)}"
    insert(gm, tensors, found, values)
    return True


def _replacement(pattern: Pattern, bindings: Bindings) -> torch.fx.GraphModule:
    """The replacement as it is with the sizes, strides and numbers of one match; layers of a model share it."""
    names = pattern.order or ()
    known, key = _known(pattern, bindings, names)
    if (pattern.replace, key) not in known:
        with fake_mode(bindings.root.graph):
            gm = trace(pattern.replace, [bindings[name] for name in names], sizes_as_constants=False)
        if list(gm.graph.find_nodes(op="get_attr")):
            raise PatternError(
                f"The replacement of the pattern {pattern.name} holds a tensor of its own.",
                "Make it in the replacement, with torch.full for instance, or let a wildcard stand for it.",
            )
        if any("unbacked_bindings" in node.meta for node in gm.graph.nodes):
            return gm  # it makes sizes that depend on data, of which each match has its own
        for node in gm.graph.nodes:
            node.meta.pop("val", None)  # it would keep the compile's fake mode, and with it this entry, for good
        known[pattern.replace, key] = gm
    return known[pattern.replace, key]


def _known(pattern: Pattern, bindings: Bindings, names: Sequence[str]) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """What was traced for a pattern in this compile, and what stands there for the values of one match."""
    mode = next(v.fake_mode for name in pattern.wildcards if hasattr(v := bindings[name], "fake_mode"))
    return pattern.retraced.setdefault(mode, {}), tuple(facts(bindings[name]) for name in names)


def _dtypes(graph: torch.fx.Graph) -> set[torch.dtype]:
    return {v.dtype for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
