"""Nodes that are alike are traced once a compile; those that are not, each; and every one computes what it should."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fault_injection import installed, launching, refuse
from torch import Tensor

import tcport
from tcport import quarantine
from tcport._inductor import lowering
from tcport.attempt import Attempt
from tcport.graph_pass import PassContext
from tcport.kernels import reference
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import register_lowering, unregister_lowering

PAGE, WIDTH, PAGES, LAYERS = 4, 5, 30, 4
FRESH = {"force_disable_caches": True}

_LIBRARY = torch.library.Library("tcport_traces", "FRAGMENT")
_LIBRARY.define("scaled(Tensor x, Scalar by) -> Tensor")
_LIBRARY.impl("scaled", lambda x, by: x * by, "CompositeExplicitAutograd")
torch.library.register_fake("tcport_traces::scaled", lambda x, by: torch.empty_like(x), lib=_LIBRARY)
scaled = torch.ops.tcport_traces.scaled.default

Caches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    quarantine.clear()
    yield
    quarantine.clear()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one with each trace."""
    made: list[str] = []
    make_fx = lowering.make_fx

    def counted(function: Callable[..., Any], **options: Any) -> Any:
        made.append("trace")
        return make_fx(function, **options)

    monkeypatch.setattr(lowering, "make_fx", counted)
    return made


def caches(count: int = LAYERS) -> Caches:
    return [(torch.randn(PAGES, PAGE, 2, 16), torch.randn(PAGES, PAGE, 2, 16)) for _ in range(count)]


def batch(size: int = 3) -> tuple[Tensor, ...]:
    """Query, key, value, block table, lengths and slots; the last token of each sequence is new."""
    tokens = [torch.randn(size, heads, 16) for heads in (4, 2, 2)]
    table = torch.randperm(PAGES)[: size * WIDTH].reshape(size, WIDTH).int()
    lens = torch.randint(1, PAGE * WIDTH + 1, (size,))
    slots = table.long().gather(1, ((lens - 1) // PAGE)[:, None]).squeeze(1) * PAGE + (lens - 1) % PAGE
    return *tokens, table, lens, slots


def model(options: list[dict[str, Any]]) -> Callable[..., Tensor]:
    """Layers with these options of attention, each on its caches."""

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, slots: Tensor, layers: Caches) -> Tensor:
        for each, (kc, vc) in zip(options, layers, strict=True):
            tcport.kv_write(k, v, kc, vc, slots)
            q = q + tcport.paged_attention(q, kc, vc, table, lens, **each)
        return q

    return run


def expected(options: list[dict[str, Any]], args: tuple[Tensor, ...], layers: Caches) -> tuple[Tensor, Caches]:
    """The result and the caches, from the reference on copies."""
    q, k, v, table, lens, slots = args
    layers = [(kc.clone(), vc.clone()) for kc, vc in layers]
    for each, (kc, vc) in zip(options, layers, strict=True):
        reference.kv_write(k, v, kc, vc, slots)
        q = q + reference.paged_attention(q, kc, vc, table, lens, **each)[0].float()
    return q, layers


def check(options: list[dict[str, Any]], layers: Caches, **given: Any) -> None:
    """One step of the compiled model against the reference, caches included."""
    args = batch()
    want, want_layers = expected(options, args, layers)
    compiled = torch.compile(model(options), backend="tcport", fullgraph=True, options=FRESH, **given)
    torch.testing.assert_close(compiled(*args, layers), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layers, want_layers, rtol=0, atol=0)


def test_equal_layers_share_one_trace(traces: list[str]) -> None:
    check([{}] * LAYERS, caches())
    assert len(traces) == 1
    report = tcport.last_report()
    assert report is not None
    assert [node.op for node in report.nodes] == ["write_and_attend"] * LAYERS


def test_layers_with_other_options_have_traces_of_their_own(traces: list[str]) -> None:
    options = [{}, {"window": 3}, {"window": 4}, {"window": 3}, {"softcap": 2.0}, {"causal": False}, {"scale": 0.1}, {}]
    check(options, caches(len(options)))
    assert len(traces) == 6


def test_layers_whose_caches_lie_otherwise_have_traces_of_their_own(traces: list[str]) -> None:
    plain, again, heads_first = caches(3)
    heads_first = tuple(cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in heads_first)  # type: ignore[assignment]
    check([{}] * 3, [plain, heads_first, again])
    assert len(traces) == 2


def test_layers_that_are_parts_of_one_pool_read_their_own_part(traces: list[str]) -> None:
    """Every part begins elsewhere."""
    pool = torch.randn(LAYERS, 2, PAGES, PAGE, 2, 16)
    before = pool.clone()

    def run(pool: Tensor, *args: Any) -> Tensor:
        return model([{}] * LAYERS)(*args, [(layer[0], layer[1]) for layer in pool])

    args = batch()
    want, want_layers = expected([{}] * LAYERS, args, [(layer[0], layer[1]) for layer in before])
    out = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(pool, *args)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool, torch.stack([torch.stack(layer) for layer in want_layers]), rtol=0, atol=0)
    assert len(traces) == LAYERS


def test_one_tensor_as_two_arguments_is_another_trace(traces: list[str]) -> None:
    """Latent attention, where V is K; and layers where it only looks as K does."""

    def run(q: Tensor, a: Tensor, b: Tensor, table: Tensor, lens: Tensor) -> list[Tensor]:
        return [tcport.paged_attention(q, k, v, table, lens) for k, v in ((a, b), (a, a), (b, a), (b, b))]

    ((a, b),), (q, _, _, table, lens, _) = caches(1), batch()
    outs = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(q, a, b, table, lens)
    for out, (k, v) in zip(outs, ((a, b), (a, a), (b, a), (b, b)), strict=True):
        want, _ = reference.paged_attention(q, k, v, table, lens)
        torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)
    assert len(traces) == 2


def test_open_sizes_that_are_one_size_and_that_are_not(traces: list[str]) -> None:
    """Two batches of open sizes: layers of one batch share a trace, those of the other do not use it."""

    def run(first: tuple[Tensor, ...], second: tuple[Tensor, ...], kc: Tensor, vc: Tensor) -> list[Tensor]:
        return [
            tcport.paged_attention(q * factor, kc, vc, table, lens)
            for q, _, _, table, lens, _ in (first, second)
            for factor in (1, 2)
        ]

    ((kc, vc),) = caches(1)
    compiled = torch.compile(run, backend="tcport", fullgraph=True, dynamic=True, options=FRESH)
    for sizes in ((3, 6), (6, 3)):
        first, second = map(batch, sizes)
        outs = compiled(first, second, kc, vc)
        wants = [
            reference.paged_attention(q * factor, kc, vc, table, lens)[0].float()
            for q, _, _, table, lens, _ in (first, second)
            for factor in (1, 2)
        ]
        torch.testing.assert_close(outs, wants, rtol=1e-5, atol=1e-5)
    assert len(traces) == 2


@contextlib.contextmanager
def lowered(run: Callable[..., Any]) -> Iterator[None]:
    """A lowering of ``scaled``."""
    register_lowering("tcport_traces::scaled", name="by_hand")(lambda spec, profile: Candidate("by_hand", "torch", run))
    try:
        yield
    finally:
        unregister_lowering("tcport_traces::scaled", "by_hand")


def test_numbers_that_are_equal_and_not_the_same(traces: list[str]) -> None:
    """1, 1.0 and True are equal, and so are 0.0 and -0.0; what is made of them need not be."""
    numbers = [1, 1.0, True, 0.0, -0.0, 1, -0.0]

    def spelled(call: Any, launch: Any) -> Tensor:
        x, by = call.args
        return torch.full_like(x, float(len(repr(by))))

    def run(x: Tensor) -> list[Tensor]:
        return [scaled(x, by) for by in numbers]

    with lowered(spelled):
        outs = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(torch.ones(3))
    assert [out[0].item() for out in outs] == [1.0, 3.0, 4.0, 3.0, 4.0, 1.0, 4.0]
    assert len(traces) == 5


def test_tensors_made_of_numbers_are_each_traces_own(traces: list[str]) -> None:
    """Whether they are written into the code (few numbers) or kept beside it, and where the model has some as well."""

    def shifted(call: Any, launch: Any) -> Tensor:
        x, by = call.args
        return x + torch.tensor([by, 10.0, 20.0]) + torch.tensor([[1.0] * 3] * 20).sum(0) + torch.tensor(0.5)

    def run(x: Tensor) -> list[Tensor]:
        return [scaled(x + torch.tensor([7.0, 8.0, 9.0]), by) for by in (1.0, 2.0, 1.0)]

    with lowered(shifted):
        outs = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(torch.zeros(3))
    assert [out.tolist() for out in outs] == [[by + 27.5, 38.5, 49.5] for by in (1.0, 2.0, 1.0)]
    assert len(traces) == 2


def test_what_inductor_cannot_lower_is_left_for_the_next_of_the_chain() -> None:
    """A branch within a lowering: Inductor lowers branches that Dynamo has captured, and raises an IndexError here."""

    def branching(call: Any, launch: Any) -> Tensor:
        x, by = call.args
        return torch.cond(x.sum() > 0, lambda x: x * by, lambda x: x - by, (x,))

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [scaled(x, 3.0), scaled(y, 3.0)]

    with lowered(branching):
        outs = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(torch.ones(2), -torch.ones(2))
    assert [out.tolist() for out in outs] == [[3.0, 3.0], [-3.0, -3.0]]
    report = tcport.last_report()
    assert report is not None
    assert [(step.kernel, step.to, step.cause) for step in report.graphs[0].fallbacks] == [
        ("by_hand [torch]", "tcport_traces::scaled [torch]", "build")
    ]


@pytest.mark.parametrize("as_eager", [False, True])
def test_layers_that_share_a_trace_draw_numbers_of_their_own(as_eager: bool, traces: list[str]) -> None:
    """By Inductor's generator, and by torch's; the same ones again from the same seed."""

    def dropped(call: Any, launch: Any) -> Tensor:
        x, by = call.args
        return torch.nn.functional.dropout(x, 0.5) * by

    def run(x: Tensor) -> list[Tensor]:
        return [scaled(x, 3.0), scaled(x, 3.0)]

    with lowered(dropped):
        compiled = torch.compile(run, backend="tcport", fullgraph=True, options={**FRESH, "fallback_random": as_eager})
        draws = []
        for _ in range(2):
            torch.manual_seed(5)
            draws.append(compiled(torch.ones(1000)))
    first, second = draws[0]
    assert set(first.tolist()) == set(second.tolist()) == {0.0, 6.0}
    assert 350 < (first == second).sum() < 650  # half of a thousand, and ten standard deviations
    assert 350 < (first == 0).sum() < 650
    torch.testing.assert_close(draws[1], draws[0], rtol=0, atol=0)
    assert len(traces) == 1


def test_sizes_that_depend_on_data_are_each_nodes_own(traces: list[str]) -> None:
    def with_count(call: Any, launch: Any) -> Tensor:
        x, by = call.args
        return x * by + x.nonzero().shape[0]

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [scaled(x, 2.0), scaled(y, 2.0)]

    with lowered(with_count), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, y = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.0, 5.0, 0.0])
        outs = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(x, y)
    assert [out.tolist() for out in outs] == [[4.0, 2.0, 8.0], [1.0, 11.0, 1.0]]
    assert len(traces) == 2


def test_arguments_with_one_value_object_between_them_stay_two() -> None:
    """A pass may give a new node the metadata of an old one."""

    def share_value(graph: torch.fx.Graph, ctx: PassContext) -> int:
        for node in graph.find_nodes(op="call_function", target=torch.ops.tcport.silu_mul.default):
            gate, up = node.args
            up.meta["val"] = gate.meta["val"]  # type: ignore[union-attr]
        return 0

    def run(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.silu(x * 3) * (y - 1)

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with tcport.registered_pass(share_value, name="share_value", after=("fuse_silu_mul",)):
        out = torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(x, y)
    x3 = x.double() * 3
    torch.testing.assert_close(out, (x3 / (1 + torch.exp(-x3)) * (y.double() - 1)).float(), rtol=1e-5, atol=1e-5)
    report = tcport.last_report()
    assert report is not None
    assert [node.op for node in report.nodes] == ["tcport::silu_mul"]


def test_a_node_that_was_not_traced_knows_what_it_launches(traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a failure at the launch of any layer is laid at its kernel's door."""
    attempts: list[Attempt] = []
    compile_graph = Attempt.compile

    def noted(attempt: Attempt, *args: Any) -> Any:
        attempts.append(attempt)
        return compile_graph(attempt, *args)

    monkeypatch.setattr(Attempt, "compile", noted)

    def run(q: Tensor, a: Tensor, b: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return tcport.paged_attention(tcport.paged_attention(q, a, b, table, lens), a, b, table, lens)

    ((a, b),), (q, _, _, table, lens, _) = caches(1), batch()
    with installed(launching("first")):
        try:
            torch.compile(run, backend="tcport", fullgraph=True, options=FRESH)(q, a, b, table, lens)
        finally:
            refuse("first", None)
    assert len(traces) == 1
    (attempt,) = attempts
    line = "buf2 = torch.ops.tcport_faults.launch.default(buf1, 'first')"
    assert [[str(c) for c in emitted.callers(line, exactly=True)] for emitted in attempt.emitted] == [
        ["first [tuned]"],
        ["first [tuned]"],
    ]
