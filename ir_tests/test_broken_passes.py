"""Every way a graph pass can be wrong, each with its own error; and what right passes may do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from tcport import graph_facts
from tcport.device import DeviceProfile
from tcport.errors import (
    EffectError,
    MalformedGraphError,
    NodeValueError,
    PassConditionError,
    PassError,
    PassMatchError,
    PassRaisedError,
    PassRegistrationError,
    PassResultError,
)
from tcport.graph_pass import GraphPass, PassContext, PassFn, register_pass
from tcport.options import Options
from tcport.pass_manager import run_passes
from tcport.pass_values import derive
from tcport.report import PassReport

aten = torch.ops.aten


def updates(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.mul_(2)
    return (x + y).t().relu()


def traced(
    fn: Callable[..., object] = updates, *args: torch.Tensor, functional: bool = False, mode: str = "fake"
) -> torch.fx.Graph:
    """A graph whose nodes carry fake values, as a pass sees it; with in-place writes unless ``functional``."""
    fn = torch.func.functionalize(fn, remove="mutations_and_views") if functional else fn
    return make_fx(fn, tracing_mode=mode)(*(args or (torch.ones(2, 3), torch.ones(2, 3)))).graph


def find(graph: torch.fx.Graph, target: object) -> torch.fx.Node:
    return graph.find_nodes(op="call_function", target=target)[0]


def run(graph: torch.fx.Graph, fn: PassFn, **options: object) -> PassReport:
    ctx = PassContext(Options(), lambda device: DeviceProfile(vendor="cpu"))
    return run_passes(graph, [GraphPass("bad", fn, **options)], ctx)[0]  # type: ignore[arg-type]


def replace(graph: torch.fx.Graph, node: torch.fx.Node, target: object, *args: object) -> torch.fx.Node:
    with graph.inserting_before(node):
        new = graph.call_function(target, args)  # type: ignore[arg-type]
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def drops_a_write(graph: torch.fx.Graph, ctx: PassContext) -> int:
    write = find(graph, aten.mul_.Tensor)
    write.replace_all_uses_with(write.args[0])  # type: ignore[arg-type]
    graph.erase_node(write)
    return 1


def hoists_a_write(graph: torch.fx.Graph, ctx: PassContext) -> int:
    find(graph, aten.add_.Tensor).prepend(find(graph, aten.mul_.Tensor))
    return 1


def hoists_a_write_in_silence(graph: torch.fx.Graph, ctx: PassContext) -> int:
    hoists_a_write(graph, ctx)
    return 0


def derives_too_early(graph: torch.fx.Graph, ctx: PassContext) -> int:
    """The value is right when it is stated, and then what the node reads is changed."""
    add, relu = find(graph, aten.add.Tensor), find(graph, aten.relu.default)
    sigmoid = replace(graph, relu, aten.sigmoid.default, *relu.args)
    sigmoid.meta["val"] = derive(sigmoid)
    with graph.inserting_after(add):
        wide = graph.call_function(aten._to_copy.default, (add,), {"dtype": torch.float64})
    wide.meta["val"] = derive(wide)
    turned = find(graph, aten.t.default)
    turned.args = (wide,)
    turned.meta["val"] = derive(turned)
    return 1


def derives_and_takes_another_argument(graph: torch.fx.Graph, ctx: PassContext) -> int:
    relu, add = find(graph, aten.relu.default), find(graph, aten.add.Tensor)
    sigmoid = replace(graph, relu, aten.sigmoid.default, *relu.args)
    sigmoid.meta["val"] = derive(sigmoid)
    sigmoid.args = (add,)
    return 1


def states_a_wrong_shape(graph: torch.fx.Graph, ctx: PassContext) -> int:
    add = find(graph, aten.add.Tensor)
    add.target = aten.mul.Tensor
    add.meta["val"] = add.meta["val"].new_empty(7)
    return 1


def states_a_wrong_dtype(graph: torch.fx.Graph, ctx: PassContext) -> int:
    add = find(graph, aten.add.Tensor)
    add.target = aten.mul.Tensor
    add.meta["val"] = add.meta["val"].double()
    return 1


def changes_strides_inside(graph: torch.fx.Graph, ctx: PassContext) -> int:
    add = find(graph, aten.add.Tensor)
    with graph.inserting_after(add):
        laid_out = graph.call_function(aten.as_strided.default, (add, [2, 3], [1, 2]))
    add.replace_all_uses_with(laid_out, delete_user_cb=lambda user: user is not laid_out)
    return 1


def changes_strides_of_an_output(graph: torch.fx.Graph, ctx: PassContext) -> int:
    relu = find(graph, aten.relu.default)
    with graph.inserting_after(relu):
        laid_out = graph.call_function(aten.clone.default, (relu,), {"memory_format": torch.contiguous_format})
    relu.replace_all_uses_with(laid_out, delete_user_cb=lambda user: user is not laid_out)
    return 1


def gives_impossible_arguments(graph: torch.fx.Graph, ctx: PassContext) -> int:
    add = find(graph, aten.add.Tensor)
    replace(graph, add, aten.mm.default, *add.args)
    return 1


def calls_a_function_of_torch(graph: torch.fx.Graph, ctx: PassContext) -> int:
    relu = find(graph, aten.relu.default)
    replace(graph, relu, torch.relu, *relu.args)
    return 1


def calls_a_python_function(graph: torch.fx.Graph, ctx: PassContext) -> int:
    relu = find(graph, aten.relu.default)
    replace(graph, relu, torch.nn.functional.relu, *relu.args)
    return 1


def calls_a_method(graph: torch.fx.Graph, ctx: PassContext) -> int:
    relu = find(graph, aten.relu.default)
    with graph.inserting_before(relu):
        relu.replace_all_uses_with(graph.call_method("relu", relu.args))
    graph.erase_node(relu)
    return 1


def makes_a_cycle(graph: torch.fx.Graph, ctx: PassContext) -> int:
    add, relu = find(graph, aten.add.Tensor), find(graph, aten.relu.default)
    add.args = (relu, add.args[1])
    return 1


def uses_another_graph(graph: torch.fx.Graph, ctx: PassContext) -> int:
    other = traced()
    relu = find(graph, aten.relu.default)
    relu.args = (find(other, aten.add.Tensor),)
    return 1


def raises(graph: torch.fx.Graph, ctx: PassContext) -> int:
    raise KeyError("val")


def returns_nothing(graph: torch.fx.Graph, ctx: PassContext) -> int:
    return None  # type: ignore[return-value]


def returns_a_bool(graph: torch.fx.Graph, ctx: PassContext) -> int:
    return True


def matches_nothing(graph: torch.fx.Graph, ctx: PassContext) -> int:
    ctx.leave(find(graph, aten.relu.default), "not followed by a quantise")
    return 0


def changes_and_says_it_did_not(graph: torch.fx.Graph, ctx: PassContext) -> int:
    find(graph, aten.add.Tensor).target = aten.sub.Tensor
    return 0


def drops_an_output(graph: torch.fx.Graph, ctx: PassContext) -> int:
    next(node for node in graph.nodes if node.op == "output").args = ([],)
    return 1


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (drops_a_write, EffectError, "'bad' dropped the node 'mul_'.*aten.mul_.*ctx.merged"),
        (hoists_a_write, EffectError, "'bad' moved the node 'mul_'.*keep their order"),
        (hoists_a_write_in_silence, EffectError, "'bad' moved the node 'mul_'.*keep their order"),
        (derives_too_early, NodeValueError, r"'sigmoid_default'.*float32\[3, 2\].*gives float64\[3, 2\]"),
        (derives_and_takes_another_argument, NodeValueError, r"'sigmoid_default'.*\[3, 2\].*gives float32\[2, 3\]"),
        (states_a_wrong_shape, NodeValueError, r"'add'.*float32\[7\].*gives float32\[2, 3\].*Delete meta\['val'\]"),
        (states_a_wrong_dtype, NodeValueError, r"'add'.*float64\[2, 3\].*gives float32\[2, 3\]"),
        (changes_strides_inside, NodeValueError, r"'t' .*strides \[1, 3\].*gives .*strides \[2, 1\]"),
        (changes_strides_of_an_output, NodeValueError, r"output 0 from .*strides \[1, 3\].* to .*strides \[2, 1\]"),
        (
            gives_impossible_arguments,
            NodeValueError,
            r"'mm_default' .*, which cannot run on .*RuntimeError",
        ),
        (calls_a_function_of_torch, MalformedGraphError, r"'relu_1', which calls 'relu' .* such as torch.ops.aten"),
        (calls_a_python_function, MalformedGraphError, r"'relu_1', which calls 'relu' and no operator.*'dynamo'"),
        (calls_a_method, MalformedGraphError, r"which calls 'relu' and no operator"),
        (makes_a_cycle, MalformedGraphError, "'add' uses 'relu' before it is computed"),
        (uses_another_graph, MalformedGraphError, "'relu' uses 'add', which belongs to another graph"),
        (drops_an_output, NodeValueError, "number of outputs from 1 to 0"),
        (raises, PassRaisedError, r"'bad' raised KeyError at test_broken_passes\.py:\d+: 'val'.*disable_passes"),
        (returns_nothing, PassResultError, "'bad' returned None.*number of matches"),
        (returns_a_bool, PassResultError, "'bad' returned True.*number of matches"),
        (changes_and_says_it_did_not, PassResultError, "'bad' changed the graph and returned 0"),
    ],
)
def test_each_fault_has_its_own_error(wrong: PassFn, error: type[PassError], said: str) -> None:
    with pytest.raises(error, match=said):
        run(traced(), wrong)


def test_matching_nothing_is_an_error_only_where_a_match_was_promised() -> None:
    report = run(traced(), matches_nothing)
    assert (report.matches, report.notes) == (0, ("relu: not followed by a quantise",))
    with pytest.raises(PassMatchError, match="matched nothing.*must_match.*relu: not followed by a quantise.*TCPORT_"):
        run(traced(), matches_nothing, must_match=True)


def test_the_functional_form_of_a_write_may_not_go_unused() -> None:
    """In a functional graph a write lives on in the use of its result; rewiring its readers would lose it."""

    graph = make_fx(
        lambda cache, row: torch.ops.higher_order.auto_functionalized_v2(
            torch.ops.tcport.kv_write.default,
            key=row, value=row, slot_mapping=torch.zeros(1, dtype=torch.int64), k_scale=None, v_scale=None,
            _k_cache_base_index=0, _v_cache_base_index=1, _all_bases=[cache, cache.clone()],
        )[1] + 1,
        tracing_mode="fake",
    )(torch.ones(2, 4, 1, 8), torch.ones(1, 1, 8)).graph  # fmt: skip

    def rewires(graph: torch.fx.Graph, ctx: PassContext) -> int:
        cache = next(iter(graph.nodes))
        find(graph, aten.add.Tensor).args = (cache, 1)
        return 1

    with pytest.raises(EffectError, match="dropped the node 'auto_functionalized_v2'.*use of its results"):
        run(graph, rewires)


def test_conditions_are_named_with_the_reason_they_fail() -> None:
    nothing = lambda graph, ctx: 0  # noqa: E731
    assert run(traced(), nothing, requires=(graph_facts.has_values, graph_facts.has(aten.relu.default))).matches == 0
    with pytest.raises(PassConditionError, match="requires functional, but the node 'add_' .*writes to its arguments"):
        run(traced(), nothing, requires=(graph_facts.functional,))
    with pytest.raises(PassConditionError, match=r"does not ensure lacks\(aten.relu.default\): the node 'relu' calls"):
        run(traced(), nothing, ensures=(graph_facts.lacks(aten.relu.default),))
    with pytest.raises(PassConditionError, match=r"requires has\(aten.mm.default\), but no node calls"):
        run(traced(), nothing, requires=(graph_facts.has(aten.mm.default),))
    with pytest.raises(PassConditionError, match="condition <lambda> of pass 'bad' returned True. Return None where"):
        run(traced(), nothing, requires=(lambda graph: True,))
    with pytest.raises(PassConditionError, match="condition <lambda> of pass 'bad' raised ZeroDivisionError: "):
        run(traced(), nothing, ensures=(lambda graph: 1 // 0,))


def test_registration_refuses_what_it_cannot_use() -> None:
    for arguments, said in (
        ({"stage": "late"}, "names the stage 'late'.*'functional'"),
        ({"after": "select_tiles"}, "has after='select_tiles'.*tuple of pass names"),
        ({"requires": graph_facts.functional}, "has requires=.*tuple of functions"),
    ):
        with pytest.raises(PassRegistrationError, match=said):
            register_pass(name="mine", **arguments)  # type: ignore[arg-type]


def test_new_nodes_get_metadata_with_symbolic_sizes() -> None:
    def doubles(graph: torch.fx.Graph, ctx: PassContext) -> int:
        relu = find(graph, aten.relu.default)
        replace(graph, relu, aten.clamp_min.default, relu.args[0], 0)
        return 1

    graph = traced(mode="symbolic")
    run(graph, doubles)
    new = find(graph, aten.clamp_min.default)
    source = find(graph, aten.t.default)
    assert [str(size) for size in new.meta["val"].shape] == [str(size) for size in source.meta["val"].shape]
    assert all(isinstance(size, torch.SymInt) for size in new.meta["val"].shape)


def test_sizes_that_depend_on_data_are_no_contradiction() -> None:
    def picks(x: torch.Tensor) -> torch.Tensor:
        return x[x.nonzero()[:, 0]] * 2

    def repoints(graph: torch.fx.Graph, ctx: PassContext) -> int:
        node = find(graph, aten.nonzero.default)
        source = node.args[0]
        with graph.inserting_before(node):
            same = graph.call_function(aten.clone.default, (source,))
        node.args = (same,)
        return 1

    assert run(traced(picks, torch.ones(5), mode="symbolic"), repoints).matches == 1


def test_a_value_is_derived_once_a_pass_while_the_node_stays_as_it_is() -> None:
    """What a pass derived is not derived again to be checked, and no later pass finds a note of it."""
    calls: list[str] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append("run")
        return torch.relu(x)

    counted.__module__ = "torch.counted"  # derived are operators and Python's own functions alone
    counted._inductor_lowering_function = True  # type: ignore[attr-defined]  # a function that Inductor calls as it is

    def puts_it_in(graph: torch.fx.Graph, ctx: PassContext) -> int:
        relu = find(graph, aten.relu.default)
        node = replace(graph, relu, counted, *relu.args)
        node.meta["val"] = derive(node)
        assert derive(node) is node.meta["val"]
        return 1

    graph = traced()
    run(graph, puts_it_in)
    assert calls == ["run"]
    (node,) = graph.find_nodes(op="call_function", target=counted)
    assert derive(node) is not node.meta["val"]
    assert calls == ["run", "run"]
