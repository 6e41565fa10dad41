"""Patterns: what they match however it is spelled, and what they leave, with the reason."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout, silu

import tcport
from tcport import pattern_engine
from tcport.pattern import Bindings, Pattern, number, tensor
from tcport.testing import assert_equivalent, assert_graph, capture, run_pass

aten = torch.ops.aten


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def as_hypot(gate: Tensor, up: Tensor) -> Tensor:
    """Stands for a fused kernel: an operation that appears nowhere else, with the pattern's result type."""
    return torch.hypot(gate, up)


GATED = Pattern(gated, as_hypot, gate=tensor("... d"), up=tensor("... d"))
X, Y = torch.randn(4, 6), torch.randn(4, 6)


def matches(pattern: Pattern, fn: Callable[..., Any] | torch.fx.GraphModule, *args: Tensor, **options: Any) -> Any:
    """The report of a pass that rewrites a pattern, and the graph."""
    graph = fn if isinstance(fn, torch.fx.GraphModule) else capture(fn, *args, **options)
    return run_pass(lambda graph, ctx: pattern.rewrite(graph, ctx), graph), graph


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as written": lambda x, y: silu(x) * y,
    "commuted": lambda x, y: y * silu(x),
    "transposes that cancel": lambda x, y: silu(x.t().t()) * y.t().transpose(0, 1),
    "views that cancel": lambda x, y: (silu(x.view(24).view(4, 6)).unsqueeze(0).squeeze(0) * y.view(4, 6)).view(4, 6),
    "casts and dropout that do nothing": lambda x, y: dropout(silu(x).to(x.dtype), 0.0, True) * y.expand(4, 6),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_it_matches_however_it_is_spelled(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    report, graph = matches(GATED, SPELLINGS[name], X.to(dtype), Y.to(dtype), dynamic=dynamic)
    assert (report.matches, report.notes) == (1, ())
    assert_graph(graph, "CHECK: aten.hypot\nCHECK-NOT: aten.exp\nCHECK-NOT: aten.mul")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_replacement_is_traced_once_for_equal_matches(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each match of other sizes or strides gets one of its own; no two nodes share a value."""
    traced: list[str] = []

    def counted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        traced.append(function.__name__)
        return trace(function, *args, **options)

    trace = pattern_engine.trace
    monkeypatch.setattr(pattern_engine, "trace", counted)

    def by_columns(gate: Tensor, up: Tensor) -> Tensor:
        """Its result says which sizes and strides it was traced for."""
        return torch.hypot(gate, up) + gate.shape[-1] + gate.stride(0)

    def fn(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        layers = [x]
        for _ in range(3):
            layers.append(silu(layers[-1]) * y)
        return [*layers[1:], silu(z) * z.neg(), silu(x.t()) * y.t()]

    pattern = Pattern(gated, by_columns, gate=tensor("... d"), up=tensor("... d"))
    z = torch.randn(4, 9)
    report, graph = matches(pattern, fn, X, Y, z, dynamic=dynamic)
    assert (report.matches, report.notes) == (5, ())
    assert traced.count("by_columns") == 3
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="call_function", target=aten.hypot.default)]
    assert len({id(value) for value in values}) == len({value.untyped_storage()._cdata for value in values}) == 5
    layers = [X]
    for _ in range(3):
        layers.append(torch.hypot(layers[-1], Y) + 6 + 6)
    want = [*layers[1:], torch.hypot(z, -z) + 9 + 9, torch.hypot(X.t(), Y.t()) + 4 + 1]
    given, tensors = [], iter((X, Y, z))
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        given.append(value.node.hint if isinstance(value, torch.SymInt) else next(tensors))
    torch.testing.assert_close(list(graph(*given)), want)


def test_operands_are_commuted_at_every_depth() -> None:
    """The first order that fits an inner operation may be wrong for the whole: both are tried."""

    def two_products(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * b + a * c

    pattern = Pattern(
        two_products, lambda a, b, c: torch.hypot(a, b + c), a=tensor("d"), b=tensor("... d"), c=tensor("... d")
    )
    for fn in (
        lambda p, q, r: p * q + p * r,
        lambda p, q, r: q * p + p * r,
        lambda p, q, r: p * q + r * p,
        lambda p, q, r: q * p + r * p,
    ):
        report, graph = matches(pattern, fn, X[0], Y, X + Y)
        assert report.matches == 1
        node = graph.graph.find_nodes(op="call_function", target=aten.hypot.default)[0]
        assert node.args[0].meta["val"].dim() == 1, "the factor that both products share"
    report, _ = matches(pattern, lambda p, q, r: p * q + r * r, X, Y, X + Y)
    assert report.matches == 0


def test_native_dropout_and_casts_between_the_parts() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        kept = torch.ops.aten.native_dropout(torch.ops.prims.convert_element_type(x.neg(), x.dtype), 0.0, True)[0]
        return kept.exp() + y

    pattern = Pattern(lambda x, y: y + x.neg().exp(), as_hypot_of, x=tensor(), y=tensor())
    graph = make_fx(fn, tracing_mode="fake")(X, Y)
    report, _ = matches(pattern, graph)
    assert report.matches == 1
    assert_graph(graph, "CHECK: aten.hypot\nCHECK-NOT: dropout\nCHECK-NOT: convert_element_type\nCHECK-NOT: aten.neg")


def as_hypot_of(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, y: silu(x) + y, (X, Y)),
        (lambda x, y: x * torch.sigmoid(y), (X, Y)),
        (lambda x, y: x / (2 + torch.exp(-x)) * y, (X, Y)),
        (lambda x, y: x / (1 + torch.exp(-y)) * y, (X, Y)),
        (lambda x, y: silu(x).t() * y, (X[:, :4], Y[:, :4])),
        (lambda x, y: silu(x).to(torch.int32).to(torch.float32) * y, (X, Y)),
        (lambda x, y: silu(x) * y, (X.double(), Y.double())),
    ],
)
def test_near_misses_are_left(fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    before = str(capture(fn, *args).graph)
    report, graph = matches(GATED, fn, *args)
    assert report.matches == 0
    assert str(graph.graph) == before


@pytest.mark.parametrize(("between", "count"), [(torch.bfloat16, 0), (torch.float32, 1)])
def test_a_cast_that_rounds_is_a_part_of_its_own(between: torch.dtype, count: int) -> None:
    """Traced without Inductor, which in torch 2.11 drops the rounding itself."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return silu(x).to(between).to(torch.float32) * y

    report, _ = matches(GATED, make_fx(fn, select_decomp_table(), tracing_mode="fake")(X, Y))
    assert report.matches == count


def test_a_mean_over_another_dimension_is_left_and_one_counted_from_the_end_is_not() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    pattern = Pattern(centred, lambda x: torch.nn.functional.softsign(x), x=tensor("... d"))
    for rank in (2, 3):
        x = torch.randn(2, 6, 6)[0] if rank == 2 else torch.randn(2, 6, 6)
        assert matches(pattern, lambda x: x - x.mean(x.dim() - 1, keepdim=True), x)[0].matches == 1
        report, _ = matches(pattern, lambda x: x - x.mean(0, keepdim=True), x)
        assert report.matches == 0
        assert "dim=[0], not [-1]" in report.notes[0]


def test_sizes_are_those_of_the_match() -> None:
    """Halves of a head are slices whose bounds depend on its size: other slices are no halves."""

    def swapped(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], -1)

    pattern = Pattern(swapped, lambda x: torch.special.entr(x), x=tensor("... d"))
    for dim in (6, 10):
        assert matches(pattern, swapped, torch.randn(3, dim), dynamic=True)[0].matches == 1
    report, _ = matches(pattern, lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1), torch.randn(3, 6))
    assert report.matches == 0
    assert "not" in report.notes[0]


def scaled_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def test_numbers_are_bound_and_given_to_the_replacement() -> None:
    wildcards = {"x": tensor("... d"), "weight": tensor("d"), "eps": number()}
    pattern = Pattern(scaled_norm, lambda x, weight, eps: torch.hypot(x, weight) * eps, **wildcards)
    module = torch.nn.RMSNorm(6, 2.0**-7)
    with torch.no_grad():
        report, graph = matches(pattern, lambda x: module(x), X)
    assert report.matches == 1
    assert_graph(graph, "CHECK: aten.hypot\nCHECK: aten.mul.Tensor{{.*}}0.0078125\nCHECK-NOT: rsqrt")


def test_other_users_of_an_inner_value_keep_the_match_from_being_taken() -> None:
    report, _ = matches(GATED, lambda x, y: [(a := silu(x)) * y, a.t() + 1], X, Y)
    assert report.matches == 0
    assert "uses div, which would no longer be computed" in report.notes[0]


def test_an_assertion_about_an_inner_value_keeps_the_match_from_being_taken() -> None:
    """It has no users, and is not dead for that."""

    def asserted(x: Tensor, y: Tensor) -> Tensor:
        a = x.neg()
        torch._assert_async(a)
        return a.exp() * y

    pattern = Pattern(lambda x, y: x.neg().exp() * y, as_hypot_of, x=tensor(), y=tensor())
    report, _ = matches(pattern, make_fx(asserted, tracing_mode="fake")(X[:1, :1], Y[:1, :1]))
    assert report.matches == 0
    assert "_assert_async uses neg, which would no longer be computed" in report.notes[0]


def test_values_that_the_pattern_returns_may_have_other_users() -> None:
    def added(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, total.relu()

    def fused(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.hypot(x, y), torch.fmod(x, y)

    pattern = Pattern(added, fused, x=tensor("... d"), y=tensor("... d"))
    report, graph = matches(pattern, lambda x, y: ((t := y + x).relu(), t * 2), X, Y)
    assert report.matches == 1
    assert_graph(graph, "CHECK: aten.hypot\nCHECK: aten.fmod\nCHECK: aten.mul\nCHECK-NOT: aten.relu")

    def used_early(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        t = x + y
        u = t * 2
        return u, t.relu()

    report, _ = matches(pattern, make_fx(used_early, tracing_mode="fake")(X, Y))
    assert report.matches == 0
    assert "mul uses add before the last part of the match" in report.notes[0]


def test_a_write_between_the_parts_keeps_the_match_from_being_taken() -> None:
    def updates(x: Tensor, y: Tensor) -> Tensor:
        a = x.neg()
        x.add_(1)
        return a.exp() * y

    pattern = Pattern(lambda x, y: x.neg().exp() * y, as_hypot_of, x=tensor(), y=tensor())
    report, _ = matches(pattern, make_fx(updates, tracing_mode="fake")(X.clone(), Y))
    assert report.matches == 0
    assert "add_ writes to memory between its parts" in report.notes[0]


def test_guards_refuse_with_a_reason() -> None:
    def wide(match: Bindings) -> str | None:
        width = match["gate"].shape[-1]
        return None if width >= 8 else f"{width} columns are too few"

    pattern = Pattern(gated, as_hypot, guards=(wide,), gate=tensor("... d"), up=tensor("... d"))
    report, _ = matches(pattern, SPELLINGS["as written"], X, Y)
    assert (report.matches, report.notes) == (0, ("mul: 6 columns are too few",))
    assert matches(pattern, SPELLINGS["as written"], torch.randn(2, 8), torch.randn(2, 8))[0].matches == 1


def test_wildcards_have_types() -> None:
    def sum_of(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x) + y

    def notes(dims: tuple[str, str], x: Tensor, y: Tensor) -> str:
        pattern = Pattern(sum_of, as_hypot_of, x=tensor(dims[0]), y=tensor(dims[1]))
        report, _ = matches(pattern, sum_of, x, y)
        return " ".join(report.notes) or str(report.matches)

    assert notes(("t d", "d"), X, Y[0]) == "1"
    assert notes(("t d", "d"), X, Y[0].half()) == "add: x is float32 but y is float16"
    assert notes(("t d", "d"), X, Y[0].long()) == "add: y is int64, not float32 or float16 or bfloat16"
    assert notes(("d", "d"), X, Y[0]) == "add: x has 2 dimensions, not 'd'"
    assert notes(("t d", "d"), X, Y[0, :1]) == "add: y has d=1, another wildcard 6"


def test_a_replacement_that_does_not_fit_is_left() -> None:
    pattern = Pattern(gated, lambda gate, up: torch.hypot(gate, up).t(), gate=tensor("... d"), up=tensor("... d"))
    report, _ = matches(pattern, SPELLINGS["as written"], X, Y)
    assert report.matches == 0
    assert (
        "the replacement gives float32[6, 4] strides [1, 6] on cpu for float32[4, 6] strides [6, 1]" in report.notes[0]
    )


@pytest.mark.parametrize("replacement", [torch.relu, aten.relu, aten.relu.default, torch.nn.functional.relu_])
def test_an_operator_may_be_the_replacement(replacement: Any) -> None:
    pattern = Pattern(lambda x: x.clamp(min=0.0), replacement, x=tensor())
    assert matches(pattern, lambda x: x.clamp(min=0.0) + 1, X)[0].matches == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bfloat16, torch.float64])
def test_a_dtype_of_its_own_is_found_in_graphs_without_fp32(dtype: torch.dtype) -> None:
    pattern = Pattern(lambda x: x.neg().abs(), torch.abs, x=tensor("... d", dtype))
    x = torch.arange(6).view(2, 3).to(dtype)
    assert matches(pattern, lambda x: x.neg().abs() + 1, x)[0].matches == 1
    graph = capture(lambda x: x.neg().abs() + 1, x)
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.abs.default)
    assert not isinstance(pattern.find(node), (str, type(None)))
    assert matches(pattern, lambda x: x.neg().abs() + 1, x.float())[0].matches == 0


def test_the_dump_is_python() -> None:
    text = GATED.python(torch.bfloat16)
    ast.parse(text)
    assert "gate = tensor('... d')" in text
    assert "CallFunction(aten.exp.default, neg_default)" in text
    assert "prims.convert_element_type.default, gate, torch.float32" in text


def test_in_a_compile() -> None:
    """As a registered pass: results, counts in the report, twice in one model."""
    pattern = Pattern(gated, lambda gate, up: up * torch.sigmoid(gate) * gate, gate=tensor("... d"), up=tensor("... d"))

    def fuse(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
        return pattern.rewrite(graph, ctx)

    def model(x: Tensor, y: Tensor) -> Tensor:
        return silu(silu(x) * y) * x

    with tcport.registered_pass(fuse, name="fuse", before=("fuse_silu_mul",)):
        assert_equivalent(model, X, Y, matches={"fuse": 2})
