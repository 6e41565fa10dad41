"""Graph passes: registration, order, and what is said about a broken pass."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.fx
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tcport.device import DeviceProfile
from tcport.errors import ArgumentError, OptionError, PassError, PassOrderError, PassRegistrationError
from tcport.graph_pass import (
    GraphPass,
    PassContext,
    register_pass,
    registered_pass,
    registered_passes,
    unregister_pass,
)
from tcport.options import Options
from tcport.pass_manager import active_passes, ordered, run_passes
from tcport.report import GraphReport

CONTEXT = PassContext(Options(), lambda device: DeviceProfile(vendor="cpu"))


def nothing(graph: torch.fx.Graph, ctx: PassContext) -> int:
    return 0


def make(name: str, after: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> GraphPass:
    return GraphPass(name, nothing, after, before)


def graph() -> torch.fx.Graph:
    return torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1).graph


def names(passes: list[GraphPass]) -> list[str]:
    return [p.name for p in passes]


def test_order_follows_the_declarations_and_then_registration() -> None:
    passes = [make("c", after=("b",)), make("a"), make("b", after=("a",)), make("d", before=("a",))]
    assert names(ordered(passes, "abcd")) == ["d", "a", "b", "c"]


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_any_acyclic_declaration_is_satisfied(rng: random.Random, count: int) -> None:
    ids = [f"p{i}" for i in range(count)]
    passes = [make(ids[i], after=tuple(ids[j] for j in range(i) if rng.random() < 0.4)) for i in range(count)]
    shuffled = passes[:]
    rng.shuffle(shuffled)
    place = {name: at for at, name in enumerate(names(ordered(shuffled, ids)))}
    assert len(place) == count
    assert all(place[earlier] < place[p.name] for p in passes for earlier in p.after)


def test_a_cycle_names_its_passes() -> None:
    with pytest.raises(PassOrderError, match=r"a -> b -> a|b -> a -> b"):
        ordered([make("a", after=("b",)), make("b", after=("a",))], "ab")


def test_an_unknown_neighbour_is_named_with_a_close_match() -> None:
    with pytest.raises(PassOrderError, match="unknown pass 'select_tile'.*Did you mean 'select_tiles'"):
        ordered([make("mine", after=("select_tile",))], ["mine", "select_tiles"])


def test_a_neighbour_that_does_not_run_does_not_matter() -> None:
    assert names(ordered([make("mine", after=("other",))], ["mine", "other"])) == ["mine"]


def test_options_choose_and_leave_out_passes() -> None:
    with registered_pass(nothing, name="mine"), registered_pass(nothing, name="yours", before=("mine",)):
        everything = names(active_passes(Options(), "functional"))
        assert everything.index("yours") < everything.index("mine")
        assert names(active_passes(Options(passes=("mine",)), "functional")) == ["mine"]
        assert "mine" not in names(active_passes(Options(disable_passes=("mine",)), "functional"))
        assert "mine" not in names(active_passes(Options(), "dynamo"))
        with pytest.raises(OptionError, match="'mime'.*Did you mean 'mine'"):
            active_passes(Options(disable_passes=("mime",)), "functional")
    assert "mine" not in registered_passes()


def test_a_name_is_registered_once() -> None:
    with registered_pass(nothing, name="mine"), pytest.raises(PassRegistrationError, match="registered already"):
        register_pass(name="mine")(nothing)


def test_a_name_may_be_given_by_place_and_must_be_given() -> None:
    register_pass("mine")(nothing)
    assert registered_passes()["mine"].run is nothing
    unregister_pass("mine")
    with pytest.raises(PassRegistrationError, match=r'@tcport.register_pass\("its_name"\)'):
        register_pass(nothing)  # type: ignore[arg-type]
    with pytest.raises(PassRegistrationError, match="'mine' is 3"):
        register_pass("mine")(3)  # type: ignore[arg-type]
    assert "mine" not in registered_passes()


def test_matches_are_counted_even_when_there_are_none() -> None:
    def two(graph: torch.fx.Graph, ctx: PassContext) -> int:
        return 2

    reports = run_passes(graph(), [make("none"), GraphPass("two", two)], CONTEXT)
    assert [(r.name, r.matches) for r in reports] == [("none", 0), ("two", 2)]


def test_what_was_saved_is_told_in_values_or_in_nodes_and_printed() -> None:
    def saves(graph: torch.fx.Graph, ctx: PassContext) -> int:
        add = next(n for n in graph.nodes if n.op == "call_function" and "add" in str(n.target))
        ctx.saved(0, [add, torch.empty(3, 5, dtype=torch.float16, device="meta")])
        return 0

    whole = capture(lambda x: torch.relu(x + 1), torch.randn(4, 2))
    (report,) = run_passes(whole, [GraphPass("saves", saves)], CONTEXT)
    assert (report.saved_operations, report.saved_bytes) == (0, 2 * (4 * 2 * 4 + 3 * 5 * 2))
    assert "    saves 0 operation(s) and 124 bytes" in str(GraphReport(passes=[report]))


def raises(graph: torch.fx.Graph, ctx: PassContext) -> int:
    raise KeyError("val")


def returns_nothing(graph: torch.fx.Graph, ctx: PassContext) -> int:
    return None  # type: ignore[return-value]


def breaks_the_graph(graph: torch.fx.Graph, ctx: PassContext) -> int:
    add = next(n for n in graph.nodes if n.op == "call_function" and "add" in str(n.target))
    relu = next(n for n in graph.nodes if "relu" in str(n.target))
    add.append(relu)  # its user now comes first
    return 1


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (raises, r"'bad' raised KeyError at test_pass_manager\.py:\d+: 'val'.*disable_passes"),
        (returns_nothing, "'bad' returned None.*number of matches"),
        (breaks_the_graph, "'bad' left a graph that is not well formed"),
    ],
)
def test_a_broken_pass_is_named(run: object, said: str) -> None:
    with pytest.raises(PassError, match=said):
        run_passes(graph(), [GraphPass("bad", run)], CONTEXT)  # type: ignore[arg-type]


def test_identity_changes_with_source_and_parameters() -> None:
    same = GraphPass("p", nothing).identity()
    assert same == GraphPass("p", nothing).identity()
    assert same != GraphPass("p", raises).identity()
    assert same != GraphPass("p", nothing, params=3).identity()


def capture(fn: Callable[..., object], *args: torch.Tensor) -> torch.fx.Graph:
    """A graph whose nodes carry fake values, as a pass sees it."""
    return make_fx(fn, tracing_mode="fake")(*args).graph


def find(graph: torch.fx.Graph, name: str) -> torch.fx.Node:
    return next(node for node in graph.nodes if name in str(node.target))


def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.mul_(2)
    return x + y


def drops_a_write(graph: torch.fx.Graph, ctx: PassContext) -> int:
    write = find(graph, "mul_")
    write.replace_all_uses_with(write.args[0])
    graph.erase_node(write)
    return 1


def hoists_a_write(graph: torch.fx.Graph, ctx: PassContext) -> int:
    find(graph, "add_").prepend(find(graph, "mul_"))
    return 1


def merges_a_write(graph: torch.fx.Graph, ctx: PassContext) -> int:
    write = find(graph, "mul_")
    with graph.inserting_after(write):
        twice = graph.call_function(torch.ops.aten.add_.Tensor, (write.args[0], write.args[0]))
    write.replace_all_uses_with(twice)
    graph.erase_node(write)
    ctx.merged(write, twice)
    return 1


def lies_about_a_shape(graph: torch.fx.Graph, ctx: PassContext) -> int:
    add = find(graph, "add.Tensor")
    add.target, add.args = torch.ops.aten.sum.default, (add.args[0],)
    return 1


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (drops_a_write, "'bad' dropped the node 'mul_'.*aten.mul_.*ctx.merged"),
        (hoists_a_write, "'bad' moved the node 'mul_' .*keep their order"),
        (lies_about_a_shape, r"'bad' left the node 'add'.*float32\[3\] strides \[1\].*gives float32\[\] .*Delete meta"),
    ],
)
def test_a_pass_that_changes_the_meaning_is_refused(run: object, said: str) -> None:
    with pytest.raises(PassError, match=said):
        run_passes(capture(writes, torch.ones(3), torch.ones(3)), [GraphPass("bad", run)], CONTEXT)  # type: ignore[arg-type]


def test_a_declared_merge_is_accepted_and_gets_metadata() -> None:
    captured = capture(writes, torch.ones(3), torch.ones(3))
    run_passes(captured, [GraphPass("good", merges_a_write)], CONTEXT)
    new = find(captured, "add_.Tensor")
    assert all(node.meta["val"].shape == (3,) for node in captured.nodes if "add_.Tensor" in str(node.target))
    assert new is not None


def test_fuel_stops_before_the_next_pass() -> None:
    reports = run_passes(graph(), [make("a"), make("b"), make("c")], PassContext(Options(pass_fuel=2), CONTEXT.profile))
    assert [r.name for r in reports] == ["a", "b"]


def test_dumps_are_numbered_readable_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPORT_DUMP", str(tmp_path / "dump"))
    run_passes(capture(writes, torch.ones(3), torch.ones(3)), [make("a"), make("b")], CONTEXT)
    files = sorted((tmp_path / "dump").iterdir())
    assert [f.name.split("-")[1:3] for f in files] == [["a", "before"], ["a", "after"], ["b", "before"], ["b", "after"]]
    assert all("def forward" in f.read_text() and "aten.mul_" in f.read_text() for f in files)
    monkeypatch.setenv("TCPORT_DUMP", str(files[0]))
    with pytest.raises(ArgumentError, match="TCPORT_DUMP"):
        run_passes(graph(), [make("a")], CONTEXT)


def test_a_dump_shows_what_new_nodes_compute_and_what_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubles(graph: torch.fx.Graph, ctx: PassContext) -> int:
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            longer = graph.call_function(torch.ops.aten.repeat.default, (output.args[0], [2]))
        output.args = (longer,)
        return 1

    monkeypatch.setenv("TCPORT_DUMP", str(tmp_path))
    with pytest.raises(PassError, match="changed output 0"):
        run_passes(capture(lambda x: x * 2, torch.ones(3)), [GraphPass("doubles", doubles)], CONTEXT)
    (after,) = tmp_path.glob("*-doubles-after-*.py")
    assert re.search(r'repeat.*: "f32\[6\]', after.read_text())


def test_identity_does_not_hold_addresses() -> None:
    """A function inside a value that a pass closes over prints with its address, which no other process has."""

    def closing_over(value: object) -> Callable[[torch.fx.Graph, PassContext], int]:
        return lambda graph, ctx: len(str(value))

    def fresh() -> Callable[[], None]:
        return lambda: None

    one, two = (GraphPass("p", closing_over((fresh(), 3))).identity() for _ in range(2))
    assert one == two
    assert one != GraphPass("p", closing_over((fresh(), 4))).identity()
