"""The test kit shipped for authors of passes: it passes what is right, and fails what is wrong, saying why."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.fx
from cache_writes import layer, step, two_tensors
from hypothesis import strategies as st
from torch import Tensor

import tcport
from tcport import history
from tcport.device import DeviceProfile
from tcport.device.catalog import catalogue_profile
from tcport.errors import ArgumentError, PassMatchError, PassOrderError
from tcport.testing import (
    assert_close,
    assert_equivalent,
    assert_graph,
    assert_no_clone,
    capture,
    count_compiles,
    inject_failure,
    lower_on,
    run_pass,
    to_device,
)

aten = torch.ops.aten


def affine(x: Tensor) -> Tensor:
    return torch.relu(x * 2) + 1


def halve_the_product(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
    """Wrong: x * 2 becomes x."""
    found = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    for node in found:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return len(found)


def product_to_sum(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
    """Right: x * 2 becomes x + x."""
    found = [n for n in graph.find_nodes(op="call_function", target=aten.mul.Tensor) if n.args[1] == 2]
    for node in found:
        node.target, node.args = aten.add.Tensor, (node.args[0], node.args[0])
    return len(found)


def torch_relu_to_silu(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
    found = graph.find_nodes(op="call_function", target=torch.relu)
    for node in found:
        node.target = torch.nn.functional.silu
        del node.meta["example_value"]
    return len(found)


def test_capture_gives_the_graph_of_each_stage_and_runs_nothing() -> None:
    caches = two_tensors()
    before = [cache.clone() for cache in caches]
    args = (*caches, *step().tensors())
    assert_graph(capture(layer, *args, stage="dynamo"), "CHECK: tcport.kv_write\nCHECK: tcport.paged_attention")
    assert_graph(capture(layer, *args), "CHECK: auto_functionalized_v2]{{.*}}kv_write\nCHECK: paged_attention")
    assert_graph(capture(layer, *args, stage="inplace"), "CHECK: auto_functionalized_v2]{{.*}}write_and_attend")
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    with pytest.raises(ArgumentError, match="no stage 'late'"):
        capture(affine, torch.ones(3), stage="late")  # type: ignore[arg-type]


def test_capture_keeps_sizes_symbolic_where_asked() -> None:
    fixed, symbolic = (capture(affine, torch.ones(3, 5), dynamic=dynamic) for dynamic in (False, True))
    shapes = [
        gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0].meta["val"].shape
        for gm in (fixed, symbolic)
    ]
    assert list(shapes[0]) == [3, 5]
    assert all(isinstance(size, torch.SymInt) for size in shapes[1])


def test_run_pass_counts_and_checks() -> None:
    graph = capture(affine, torch.ones(3))
    assert run_pass(product_to_sum, graph, matches=1).matches == 1
    torch.testing.assert_close(graph(torch.tensor([1.0, -2.0, 3.0]))[0], torch.tensor([3.0, 1.0, 7.0]))
    with pytest.raises(PassMatchError, match="'product_to_sum' matched 0 times, not 1"):
        run_pass(product_to_sum, graph, matches=1)
    with pytest.raises(ArgumentError, match="no pass named 'select_tile'.*Did you mean 'select_tiles'"):
        run_pass("select_tile", graph)


@pytest.mark.parametrize(
    "checks",
    [
        "CHECK: aten.mul.Tensor\nCHECK-NEXT: aten.relu",
        "CHECK: %[[X:mul\\w*]] {{.*}}aten.mul\nCHECK: aten.relu.default](args = (%[[X]],)",
        "CHECK-NOT: aten.sub\nCHECK: aten.add\nCHECK-NOT: aten.mul",
        "CHECK-COUNT-3: call_function",
        "a comment\ncheck the rest\n# CHECK: placeholder",
    ],
)
def test_assert_graph_accepts(checks: str) -> None:
    assert_graph(capture(affine, torch.ones(3)), checks)


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ("CHECK: aten.relu\nCHECK: aten.mul", "'CHECK: aten.mul' is not met"),
        ("CHECK: aten.mul\nCHECK-NEXT: aten.add", "'CHECK-NEXT: aten.add' is not met"),
        ("CHECK: aten.mul\nCHECK-NOT: aten.relu\nCHECK: aten.add", "'CHECK-NOT: aten.relu' is met"),
        ("CHECK: aten.mul\nCHECK-NOT: aten.add", "'CHECK-NOT: aten.add' is met"),
        ("CHECK-COUNT-4: call_function", "'CHECK-COUNT-4: call_function' is not met"),
    ],
)
def test_assert_graph_refuses_and_shows_the_graph(checks: str, said: str) -> None:
    with pytest.raises(
        AssertionError, match=f"{said}(.|\n)*-> .*(.|\n)*placeholder|{said}(.|\n)*placeholder(.|\n)*-> "
    ):
        assert_graph(capture(affine, torch.ones(3)), checks)


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ("aten.mul", "no directive in the checks"),
        ("CHECK: aten.mul\nCHECK_NOT: aten.relu", "'CHECK_NOT: aten.relu' is no check"),
        ("CHECK: aten.mul\nCHECK-SAME: aten.relu", "'CHECK-SAME: aten.relu' is no check"),
        ("CHECK: aten.mul\n  CHECK-NOT aten.relu", "'CHECK-NOT aten.relu' is no check"),
        ("CHECK: aten.mul\n# check-not: aten.relu", "'# check-not: aten.relu' is no check"),
        ("CHECKNOT: aten.relu", "'CHECKNOT: aten.relu' is no check"),
    ],
)
def test_assert_graph_takes_no_misspelt_directive_for_a_comment(checks: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"{said}.*'CHECK-NOT:'"):
        assert_graph(capture(affine, torch.ones(3)), checks)


def test_assert_graph_names_a_pattern_that_cannot_be_read() -> None:
    with pytest.raises(ArgumentError, match=r"'aten.\{\{\(\}\}' holds no regular expression"):
        assert_graph(capture(affine, torch.ones(3)), "CHECK: aten.{{(}}")
    with pytest.raises(ArgumentError, match=r"names \[\[X\]\], which no check before it binds"):
        assert_graph(capture(affine, torch.ones(3)), "CHECK-NOT: aten.[[X]]")
    assert_graph(capture(affine, torch.ones(3)), "CHECK: %[[X:mul\\w*]] :\nCHECK-NEXT: relu.default](args = (%[[X]],)")


def test_a_function_is_no_graph() -> None:
    for use in (lambda: assert_graph(affine, "CHECK: aten.mul"), lambda: run_pass("select_tiles", affine)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="a function was given. Take one from capture"):
            use()


def test_a_pass_that_is_not_there_is_told_from_one_that_matched_nothing() -> None:
    with pytest.raises(PassMatchError, match="'mine' did not run; these did: .*select_tiles.*Import the module"):
        assert_equivalent(affine, torch.ones(3), matches={"mine": 1})


def test_errors_of_passes_reach_the_test_as_they_are() -> None:
    with tcport.registered_pass(lambda graph, ctx: 0, name="mine", after=("missing",)):
        for check in (capture, assert_equivalent, functools.partial(lower_on, catalogue_profile("h200"))):
            with pytest.raises(PassOrderError, match="unknown pass 'missing'"):
                check(affine, torch.ones(3))


def test_assert_equivalent_tells_right_passes_from_wrong_ones() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    with tcport.registered_pass(product_to_sum, name="mine"):
        assert_equivalent(affine, x, matches={"mine": 1}, exact=True)
        with pytest.raises(PassMatchError, match="'mine' matched 1 times, not 2"):
            assert_equivalent(affine, x, matches={"mine": 2})
    with (
        tcport.registered_pass(halve_the_product, name="wrong"),
        pytest.raises(AssertionError, match="result 0 is off by"),
    ):
        assert_equivalent(affine, x)
    with pytest.raises(PassMatchError, match="'mine' did not run"):
        assert_equivalent(affine, x, matches={"mine": 1})


def test_assert_equivalent_draws_arguments() -> None:
    sizes: list[int] = []

    def seen(size: int) -> tuple[Tensor]:
        sizes.append(size)
        return (torch.arange(float(size)),)

    with tcport.registered_pass(product_to_sum, name="mine"):
        assert_equivalent(affine, st.integers(2, 9).map(seen), examples=6, dynamic=True)
    assert len(set(sizes)) > 1


def test_assert_equivalent_sees_what_is_written() -> None:
    def drops_nothing_but_changes_the_value(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
        node = graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
        node.args = (node.args[0], 2)
        return 1

    def increments(x: Tensor) -> None:
        x.add_(1)

    assert_equivalent(increments, torch.ones(3))
    wrong = tcport.registered_pass(drops_nothing_but_changes_the_value, name="wrong")
    with wrong, pytest.raises(AssertionError, match="argument 0 differs in 3 of 3 elements"):
        assert_equivalent(increments, torch.ones(3))


def test_assert_equivalent_sees_a_result_that_shares_memory() -> None:
    def returns_the_original(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
        node = graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        return 1

    wrong = tcport.registered_pass(returns_the_original, name="wrong")
    with wrong, pytest.raises(AssertionError, match=r"result 0 shares memory with the arguments \[0\], expected \[\]"):
        assert_equivalent(lambda x, y: x + y, torch.ones(3), torch.zeros(3))


def test_a_pass_on_the_dynamo_graph_runs_before_the_rest() -> None:
    with tcport.registered_pass(torch_relu_to_silu, name="mine", stage="dynamo"):
        graph = capture(affine, torch.ones(3))
    assert_graph(graph, "CHECK-NOT: aten.relu\nCHECK: aten.exp")


H200 = catalogue_profile("h200")
CPU = DeviceProfile(vendor="cpu")


def test_lower_on_chooses_for_devices_that_are_not_there() -> None:
    args = (
        *(cache.half() for cache in two_tensors()),
        *(t.half() if t.is_floating_point() else t for t in step().tensors()),
    )
    there = lower_on(H200, layer, *args)
    here = lower_on(CPU, layer, *args)
    assert [(n.op, n.kernel, n.tier) for n in there] == [("write_and_attend", "triton_write+triton_decode", "tuned")]
    assert there[0].tile
    assert [(n.op, n.kernel) for n in here] == [("write_and_attend", "cpp_write+cpp_attention")]
    forced = lower_on(H200, layer, *args, options={"kernel": "torch_attention"})
    assert [n.kernel for n in forced] == ["triton_write+torch_attention"]


def test_one_tensor_under_two_names_is_one_on_another_device() -> None:
    cache = torch.zeros(4)
    moved = to_device({"k": cache, "v": cache, "half": cache[2:], "n": 3}, "meta")
    assert moved["k"] is moved["v"]
    assert moved["half"].storage_offset() == 2
    assert moved["n"] == 3


def test_compiles_are_counted_and_injected_failures_stepped_over(
    tcport_compiles: object, tcport_inject_failure: Callable[..., None]
) -> None:
    args = (*two_tensors(), *step().tensors())
    assert_no_clone(layer, *args)
    assert tcport_compiles == 1
    assert 0 < tcport_compiles <= 1 < 2  # type: ignore[operator]
    assert not tcport_compiles < 1  # type: ignore[operator]
    assert repr(tcport_compiles) == "1 compile"
    with count_compiles() as none:
        pass
    assert none == 0
    assert repr(none) == "0 compiles"
    with pytest.raises(ArgumentError, match="no kernel named 'triton_decod'.*triton_decode"):
        tcport_inject_failure("triton_decod")


def test_an_injected_failure_reaches_the_chain() -> None:
    """What a kernel was not built for costs the kernel; what one that is loaded says of the call reaches the caller."""
    q, kc, vc, table, lens = step().query, *two_tensors(), step().table, step().lens
    want = tcport.paged_attention(q, kc, vc, table, lens)
    with inject_failure("cpp_attention", RuntimeError("injected")), pytest.raises(RuntimeError, match="injected"):
        tcport.paged_attention(q, kc, vc, table, lens)
    with inject_failure("cpp_attention"):
        torch.testing.assert_close(tcport.paged_attention(q, kc, vc, table, lens), want, rtol=1e-5, atol=1e-5)
        assert "injected" in history.fallbacks()[-1].message
    assert torch.equal(tcport.paged_attention(q, kc, vc, table, lens), want)


def test_a_cache_copy_fails() -> None:
    def snapshot(kc: Tensor, vc: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return layer(kc, vc, *rest), kc.clone()

    with pytest.raises(AssertionError, match=f"copies a cache: .* of {24 * 4 * 2 * 8 * 4} bytes from"):
        assert_no_clone(snapshot, *two_tensors(), *step().tensors())


def test_a_mean_is_one_of_four_tokens_at_least() -> None:
    """Rounded weights move all numbers of a token alike, by up to 2**-8 in bf16."""
    right = torch.ones(4, 4, 16, dtype=torch.float64)
    moved = (right * (1 + 2**-8)).float()
    for tokens in (1, 3):
        assert_close(moved[:tokens], right[:tokens], dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"0.00391 on average; allowed: 0.02 and 0.002"):
        assert_close(moved, right, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"off by 0.0312"):
        assert_close((right[:1] * (1 + 2**-5)).float(), right[:1], dtype=torch.bfloat16)
    assert_close(torch.tensor(1.0), torch.tensor(1.0))


@pytest.mark.parametrize("wrong", [0.0, 1.0, torch.inf, -torch.inf])
def test_what_must_be_nan_or_infinite_is_that_and_no_other_number(wrong: float) -> None:
    want = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    assert_close(want.clone(), want)
    for place in (1, 2, 3):
        actual = want.clone()
        actual[place] = wrong
        if wrong == want[place]:
            continue
        with pytest.raises(AssertionError, match="differs where infinite or NaN numbers are expected"):
            assert_close(actual, want)
