"""How models spell a quantise to 8 bits, and how one is taken into the operator before it.

The spellings are plain PyTorch in fp32: a tensor is divided by a scale or multiplied, saturated, and cast to
float8_e4m3fn or (rounded before or after it is saturated to -128..127) int8. The scale is a tensor of one element; or
each row's largest magnitude over 448 or 127, with at most one floor: under the magnitude, or under the scale.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tcport import quantise_ops as quantise_ops  # defines the operators
from tcport.effects import writes_in_place
from tcport.graph_pass import PassContext
from tcport.kernels.quantise import LIMITS
from tcport.no_ops import innermost
from tcport.pass_values import agree, derive
from tcport.pattern import Pattern, number, tensor
from tcport.pattern_match import Found, outside_user

aten = torch.ops.aten
_FLOORS = ("amax_floor", "scale_floor", "")
_NEAR = 16
"""Operations between a layer operator and the last one of a quantise, views included; the spellings have up to 11."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One meaning, with its spellings.

    Attributes:
        dtype: of the result. multiply: as :func:`tcport.kernels.quantise.quantise` takes it.
        floor: which of its floors there is, or "". by_row: whether each row has a scale of its own.
    """

    dtype: torch.dtype
    multiply: bool
    by_row: bool
    floor: str = ""

    def operands(self, found: Found) -> tuple[torch.fx.Node, torch.fx.Node | None]:
        """What is quantised, and the scale that is given: of two factors, the one of one element."""
        x, scale = found.bindings.nodes["x"], found.bindings.nodes.get("scale")
        swapped = self.multiply and scale is not None and not _is_one(scale) and _is_one(x)
        return (scale, x) if swapped else (x, scale)  # type: ignore[return-value]

    def arguments(self, found: Found) -> tuple[Any, ...]:
        """What the operators take after their own arguments."""
        nodes = found.bindings.nodes
        floors = (nodes["floor"] if self.floor == name else 0.0 for name in ("amax_floor", "scale_floor"))
        return self.operands(found)[1], self.dtype, self.multiply, *floors

    def pattern(self) -> Pattern:
        """Its spellings. The replacement is never used: :func:`fuse_behind` makes the operator."""
        if not self.by_row:
            spellings = [_by_given_scale(self, *how) for how in itertools.product((False, True), repeat=2)]
            return Pattern(spellings, spellings[0], x=tensor("... d"), scale=tensor("*", torch.float32))
        spellings = [_by_row(self, *how) for how in itertools.product((False, True), repeat=3)]
        floor: dict[str, Any] = {"floor": number()} if self.floor else {}
        return Pattern(spellings, spellings[0], x=tensor("... d"), **floor)


def _is_one(node: torch.fx.Node) -> bool:
    return bool(statically_known_true(node.meta["val"].numel() == 1))


def _by_given_scale(form: Form, cast: bool, saturate_first: bool) -> Callable[..., Any]:
    def static_quantise(x: Tensor, scale: Tensor) -> Tensor:
        wide = x.to(torch.float32) if cast else x
        return _to_8_bits(wide * scale if form.multiply else wide / scale, form.dtype, saturate_first)

    return static_quantise


def _by_row(form: Form, cast: bool, cast_before_amax: bool, by_max: bool) -> Callable[..., Any]:
    def row_quantise(x: Tensor, *floors: float) -> tuple[Tensor, Tensor]:
        magnitude = (x.to(torch.float32) if cast_before_amax else x).abs()
        amax = magnitude.max(-1, keepdim=True).values if by_max else magnitude.amax(-1, keepdim=True)
        amax = amax.to(torch.float32)
        if form.floor == "amax_floor":
            amax = amax.clamp(min=floors[0])
        scale = amax / LIMITS[form.dtype]
        if form.floor == "scale_floor":
            scale = scale.clamp(min=floors[0])
        wide = x.to(torch.float32) if cast else x
        return scale, _to_8_bits(wide * scale.reciprocal() if form.multiply else wide / scale, form.dtype, False)

    def with_floor(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        return row_quantise(x, floor)

    def without_floor(x: Tensor) -> tuple[Tensor, Tensor]:
        return row_quantise(x)

    return with_floor if form.floor else without_floor


def _to_8_bits(scaled: Tensor, dtype: torch.dtype, saturate_first: bool) -> Tensor:
    if dtype != torch.int8:
        return scaled.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype)
    if saturate_first:
        return scaled.clamp(-128, 127).round().to(dtype)
    return scaled.round().clamp(-128, 127).to(dtype)


PATTERNS = tuple(
    (form, form.pattern())
    for dtype in LIMITS
    for multiply in (False, True)
    for form in (Form(dtype, multiply, False), *(Form(dtype, multiply, True, floor) for floor in _FLOORS))
)


def fuse_behind(graph: torch.fx.Graph, ctx: PassContext, source: Any, result: int | None, fused: Any) -> int:
    """Take every quantise of an operator's result into the operator; returns their number.

    Args:
        source: the operator. result: which of its results is quantised, the last one; None: it has one alone.
        fused: the operator that does both: it takes the arguments of ``source`` and those of :meth:`Form.arguments`,
            and gives the results before ``result``, the quantised tensor, and the scales.
    """
    matches = 0
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node._erased or not isinstance(value, Tensor) or value.dtype not in LIMITS or not _is_near(node, source):
            continue
        reasons = []
        for form, found in _quantises(node):
            reason = found if isinstance(found, str) else _fuse(graph, ctx, form, found, source, result, fused)
            if reason is None:
                matches += 1
                break
            reasons.append(reason)
        else:
            for reason in dict.fromkeys(reasons):
                ctx.leave(node, reason)
    return matches


def _quantises(node: torch.fx.Node) -> Iterator[tuple[Form, Found | str]]:
    for form, pattern in PATTERNS:
        if form.dtype == node.meta["val"].dtype and (found := pattern.find(node)) is not None:
            yield form, found


def _is_near(node: torch.fx.Node, source: Any) -> bool:
    """Whether a node is computed from an operator's result in few steps."""
    reached = {node}
    for _ in range(_NEAR):
        reached = {n for at in reached for n in at.all_input_nodes}
        if any(n.target is source for n in reached):
            return True
    return False


def _fuse(
    graph: torch.fx.Graph, ctx: PassContext, form: Form, found: Found, source: Any, result: int | None, fused: Any
) -> str | None:
    """Put the fused operator in the place of a quantise and what it quantises; the reason where that cannot be."""
    root = found.bindings.root
    behind, views = _behind_views(form.operands(found)[0])
    layer: Any = behind.args[0] if result is not None and behind.target is operator.getitem else behind
    if layer.target is not source or (result is not None and behind.args[1:] != (result,)):
        return "what is quantised is another result"
    reason = _obstacle(form, found, behind, layer)
    if reason is not None:
        return reason
    made: list[torch.fx.Node] = []

    def call(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        made.append(node)
        node.meta["val"] = derive(node)
        return node

    taken = {}
    with graph.inserting_before(root):
        both = call(fused, *layer.args, *form.arguments(found))
        for user in layer.users:
            if user is not behind and user.target is operator.getitem:
                taken[user] = call(operator.getitem, both, user.args[1])
        first = result or 0
        quantised, scales = call(operator.getitem, both, first), call(operator.getitem, both, first + 1)
        for view in reversed(views):
            quantised = call(view.target, quantised, view.args[1])
            if form.by_row:
                scales = call(view.target, scales, [*view.args[1][:-1], 1])  # type: ignore[index,misc]
    taken |= dict(zip(found.outputs, (scales, quantised) if form.by_row else (quantised,), strict=True))
    for old, new in taken.items():
        if not agree(old.meta["val"], new.meta["val"]):
            for node in reversed(made):
                graph.erase_node(node)
            return f"{old.name} has another layout than {fused} gives"
    ctx.saved(*found.saving(also=(behind,)))
    for old, new in taken.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in found.inner)
    found.erase()
    for node in (*views, behind, *taken, layer):
        if not node._erased and not node.users:
            graph.erase_node(node)
    return None


def _behind_views(x: torch.fx.Node) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
    """What a tensor is a view of that has the same rows; the views, last first."""
    views = []
    while x.target in (aten.view.default, aten.reshape.default) and x.args[1][-1] == x.args[0].meta["val"].shape[-1]:  # type: ignore
        views.append(x)
        x = x.args[0]  # type: ignore[assignment]
    return x, views


def _obstacle(form: Form, found: Found, behind: torch.fx.Node, layer: torch.fx.Node) -> str | None:
    """Why a quantise is left where it is; None where it need not be."""
    root = found.bindings.root
    if innermost(root.args[0]).meta["val"].dtype != torch.float32:  # type: ignore[arg-type]
        return "it is not scaled in fp32"
    scale = form.operands(found)[1]
    if scale is not None and not _is_one(scale):
        return f"its scale has {scale.meta['val'].numel()} elements"
    if (user := outside_user(behind, found.inner)) is not None:
        return f"{user.name} uses {behind.name} too"
    place = {node: number for number, node in enumerate(root.graph.nodes)}
    for result in layer.users:
        for user in result.users if result is not behind and result.target is operator.getitem else ():
            if place[user] < place[root]:
                return f"{user.name} uses {result.name} before it"
    for node in root.graph.nodes:
        if place[layer] < place[node] < place[root] and writes_in_place(node):
            return f"{node.name} writes to memory before it"
    return None
