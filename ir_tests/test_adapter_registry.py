"""The extension point: a spelling of one's own is one function, and what it gets wrong is caught."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from adapter_harness import problem, run
from torch import Tensor
from torch.fx import Node

import tcport
from tcport.adapter import Match, Rejected, Rejection, registered_matchers
from tcport.adapter.emit import Emitter
from tcport.adapter.graph import GraphFacts
from tcport.errors import ArgumentError

PAGED = torch.ops.tcport.paged_attention.default


@torch.library.custom_op("tcport_tests::house_attention", mutates_args=())
def house_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """A house's own kernel, which the matcher below knows to be paged attention."""
    return tcport.paged_attention(q, k_cache, v_cache, table, lens)


@house_attention.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    return torch.empty_like(q)


def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    return torch.ops.tcport_tests.house_attention.default(q.squeeze(2), k_cache, v_cache, table, lens) + 1


TARGETS = (torch.ops.tcport_tests.house_attention.default,)


@pytest.fixture
def name() -> Iterator[str]:
    yield "house"
    if "house" in [matcher.name for matcher in registered_matchers()]:
        tcport.unregister_matcher("house")


def test_a_matcher_of_ones_own(name: str) -> None:
    @tcport.register_matcher(name, targets=TARGETS)
    def match(facts: GraphFacts, node: Node) -> Match:
        def build(emit: Emitter) -> Node:
            return emit.call(
                torch.ops.aten.alias.default, emit.call(lambda pair: pair[0], emit.call(PAGED, *node.args))
            )

        return Match("paged_attention", node, build, matcher=name)

    adapted = run(model, *problem().args)
    assert adapted.kinds == ["paged_attention:house"], adapted.report
    assert len(adapted.calls(PAGED)) == 1
    assert not adapted.calls(TARGETS[0])


@pytest.mark.parametrize("raises", [True, False])
def test_a_matcher_that_rejects(name: str, raises: bool) -> None:
    @tcport.register_matcher(name, targets=TARGETS)
    def match(facts: GraphFacts, node: Node) -> Rejection:
        if raises:
            raise Rejected("layout", "not today")
        return Rejection(node, "layout", "not today", name)

    adapted = run(model, *problem().args)
    assert str(adapted.report) == "house_attention_default: left alone [layout]: not today"


def test_a_replacement_of_the_wrong_shape_is_undone(name: str) -> None:
    @tcport.register_matcher(name, targets=TARGETS)
    def match(facts: GraphFacts, node: Node) -> Match:
        return Match("paged_attention", node, lambda emit: emit.call("flatten", node.args[0]), matcher=name)

    adapted = run(model, *problem().args)
    assert adapted.rules == ["layout"]
    assert "replacement" in adapted.report.rejections[0].reason
    assert not adapted.calls("flatten")


def test_an_invalid_canonical_call_is_undone(name: str) -> None:
    @tcport.register_matcher(name, targets=TARGETS)
    def match(facts: GraphFacts, node: Node) -> Match:
        def build(emit: Emitter) -> Node:
            q, *rest = node.args
            return emit.call(lambda pair: pair[0], emit.call(PAGED, emit.call("to", q, torch.float64), *rest))

        return Match("paged_attention", node, build, matcher=name)

    adapted = run(model, *problem().args)
    assert adapted.rules == ["layout"]
    assert "float64" in adapted.report.rejections[0].reason
    assert not adapted.calls(PAGED)


def test_only_the_matchers_asked_for_are_used() -> None:
    from tcport.adapter import adapt

    reports = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> object:
        reports.append(adapt(gm, matchers=[m for m in registered_matchers() if m.name == "canonical"]))
        return gm.forward

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        keys, values = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(attend, backend=backend)(*problem().args)
    assert reports[0].records == ()


def test_names_are_unique(name: str) -> None:
    tcport.register_matcher(name)(lambda facts, node: None)
    with pytest.raises(ArgumentError, match="registered already"):
        tcport.register_matcher(name)


def test_unknown_stage_and_unknown_name() -> None:
    with pytest.raises(ArgumentError, match="allowed: attention, write"):
        tcport.register_matcher("other", stage="later")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no matcher named 'other'"):
        tcport.unregister_matcher("other")
