"""The backend end to end on small models: results, options, errors, recompiles, copies, reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport.errors import HeadRatioError, NoCandidateError, OptionError, PassError, ShapeError
from tcport.kernels import reference

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 4


def attend(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor, slots: Tensor
) -> Tensor:
    """One layer's worth: write the new token, attend, and something around it for Inductor to fuse."""
    tcport.kv_write(k * 2, v + 1, kc, vc, slots)
    return torch.relu(tcport.paged_attention(q * 0.5, kc, vc, table, lens)) + 1


def batch(size: int, width: int = 5, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    pages = size * width + 3
    table = torch.randperm(pages, generator=rng)[: size * width].reshape(size, width).int()
    lens = torch.randint(1, width * PAGE + 1, (size,), generator=rng).int()
    last = lens.long() - 1
    slots = table.gather(1, (last // PAGE)[:, None]).squeeze(1) * PAGE + last % PAGE

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    q, k, v = normal(size, HEADS, DIM), normal(size, KV_HEADS, DIM), normal(size, KV_HEADS, DIM)
    caches = normal(pages, PAGE, KV_HEADS, DIM), normal(pages, PAGE, KV_HEADS, DIM)
    return [q, k, v, *caches, table, lens, slots]


def expected(args: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both caches, from the fp64 reference on copies."""
    q, k, v, kc, vc, table, lens, slots = (a.clone() for a in args)
    reference.kv_write(k * 2, v + 1, kc, vc, slots)
    out, _ = reference.paged_attention(q * 0.5, kc, vc, table, lens, compute_dtype=torch.float64)
    return torch.relu(out).float() + 1, kc, vc


def check(compiled: Any, args: list[Tensor]) -> None:
    want = expected(args)
    torch.testing.assert_close(compiled(*args), want[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(args[3], want[1])
    assert torch.equal(args[4], want[2])


@pytest.mark.parametrize("options", [{}, {"level": "attention"}, {"kernel": "torch_attention", "strict": True}])
def test_compiled_equals_the_reference(options: dict[str, Any]) -> None:
    compiled = torch.compile(attend, backend="tcport", fullgraph=True, dynamic=True, options=options)
    for size in (3, 2):
        check(compiled, batch(size, seed=size))


def test_reduce_overhead_mode_is_accepted() -> None:
    """HF's generate passes it by default; options and mode cannot be given together."""
    check(torch.compile(attend, backend="tcport", fullgraph=True, mode="reduce-overhead"), batch(2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_assertions_about_data_compile_and_hold(dynamic: bool) -> None:
    """They are nodes without a value; sizes that depend on data bring them along."""

    def checked(lens: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        torch._check(lens.sum().item() > 2, lambda: "too few keys")
        return attend(*args), args[0][:, 0, 0].gt(0).nonzero().float() * 2

    compiled = torch.compile(checked, backend="tcport", fullgraph=True, dynamic=dynamic)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for size in (3, 2):
            args = batch(size, seed=size)
            rows = [[2.0 * i] for i, row in enumerate(args[0].tolist()) if row[0][0] > 0]
            want = expected(args)[0]
            out, doubled = compiled(torch.full((size,), 5), *args)
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
            assert doubled.tolist() == rows
        with pytest.raises(RuntimeError, match=r"u\d+ >=? [23]"):
            compiled(torch.zeros(2, dtype=torch.int64), *args)


def test_at_most_two_compiles_for_any_batch_of_two_or_more() -> None:
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="tcport", fullgraph=True)
    with tcport.history.collected() as report:
        for step in range(12):
            check(compiled, batch(2 + step % 4, seed=step))
    assert len(report.graphs) <= 2


def test_explain_names_kernels_rejections_and_copies() -> None:
    report = tcport.explain(attend, *batch(3))
    assert [(n.op, n.kernel, n.tier) for n in report.nodes] == [
        ("write_and_attend", "cpp_write+cpp_attention", "tuned"),
    ]
    reasons = {r.kernel: r.reason for n in report.nodes for r in n.rejected}
    assert reasons["triton_decode"] == "Triton has no CPU target"
    assert report.clones == []
    passes = [("merge_kv_write", 1), ("select_tiles", 1), ("write_in_place", 1)]
    ran = [(p.name, p.matches) for p in report.graphs[0].passes]
    assert [p for p in ran if p[0] in dict(passes)] == passes  # other tests bring passes of their own
    assert json.loads(json.dumps(report.to_dict()))["graphs"][0]["nodes"][0]["kernel"] == "cpp_write+cpp_attention"
    text = str(report)
    assert "write_and_attend -> cpp_write+cpp_attention [tuned]" in text
    assert "no cache-sized copies" in text


def test_a_copy_of_the_cache_is_reported() -> None:
    def snapshot(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        return tcport.paged_attention(q, kc, vc, table, lens), kc.clone()

    args = batch(3)
    report = tcport.explain(snapshot, args[0], *args[3:7])
    assert len(report.clones) == 1
    assert report.clones[0].bytes == args[3].numel() * 4
    assert "CACHE COPY" in str(report)


@pytest.mark.parametrize("level", ["full", "attention"])
def test_forcing_a_kernel_that_refuses_is_an_error(level: str) -> None:
    compiled = torch.compile(attend, backend="tcport", options={"kernel": "triton_decode", "level": level})
    with pytest.raises(NoCandidateError, match="triton_decode: Triton has no CPU target"):
        compiled(*batch(2))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"kernal": "x"}, "Did you mean 'kernel'"), ({"kernel": "torch_atention"}, "Did you mean torch_attention")],
)
def test_a_misspelt_option_reaches_the_user_as_it_is(options: dict[str, Any], said: str) -> None:
    args = batch(2)
    before = args[3].clone()
    with pytest.raises(OptionError, match=said):
        torch.compile(attend, backend="tcport", options=options)(*args)
    assert torch.equal(args[3], before)


def test_a_bad_call_raises_the_same_error_compiled_and_eager_and_writes_nothing() -> None:
    for wrong, error in ((0, HeadRatioError), (6, ShapeError)):
        args = batch(3)
        args[wrong] = args[wrong][:, :5] if wrong == 0 else args[wrong][:2]
        before = args[3].clone()
        messages = []
        for call in (attend, torch.compile(attend, backend="tcport", fullgraph=True, dynamic=True)):
            with pytest.raises(error) as caught:
                call(*(a.clone() if i != 3 else a for i, a in enumerate(args)))
            messages.append(str(caught.value))
            args[3].copy_(before)
        assert messages[0] == messages[1]


def test_two_compiles_with_different_options_do_not_share() -> None:
    forced = torch.compile(attend, backend="tcport", options={"kernel": "torch_attention"})
    free = torch.compile(attend, backend="tcport")
    with tcport.history.collected() as first:
        check(forced, batch(2))
    with tcport.history.collected() as second:
        check(free, batch(2))
    assert first.options == {"kernel": "torch_attention"}
    assert second.options == {}


def test_a_users_pass_runs_and_a_broken_one_is_named() -> None:
    seen: list[int] = []

    def count_relus(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
        found = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        seen.append(len(found))
        return len(found)

    def broken(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
        raise ValueError("no such node")

    with tcport.registered_pass(count_relus, name="count_relus", after=("select_tiles",)):
        report = tcport.explain(attend, *batch(2))
    assert seen == [1]
    matches = {p.name: p.matches for p in report.graphs[0].passes}
    assert list(matches)[-2:] == ["count_relus", "write_in_place"]
    assert matches["count_relus"] == 1
    with tcport.registered_pass(broken, name="broken"), pytest.raises(PassError, match="'broken' raised ValueError"):
        tcport.explain(attend, *batch(2))


def test_a_users_own_inductor_pass_composes() -> None:
    calls: list[int] = []

    def mine(graph: torch.fx.Graph) -> None:
        calls.append(len(graph.nodes))

    report = tcport.explain(attend, *batch(2), explain_options={"post_grad_custom_pre_pass": mine})
    assert len(calls) == 1
    assert any("mine has no uuid" in note for note in report.graphs[0].notes)


def test_nothing_leaks_into_a_later_plain_inductor_compile() -> None:
    tcport.explain(attend, *batch(2))
    with tcport.history.collected() as report:
        check(torch.compile(attend, backend="inductor", fullgraph=True), batch(3))
    assert report.graphs == []
    assert torch._inductor.config.post_grad_custom_pre_pass is None


def plain(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor, slots: Tensor
) -> Tensor:
    """What :func:`attend` does, as a model that has never heard of tcport spells it."""
    page, offset = slots // PAGE, slots % PAGE
    kc[page, offset] = k * 2
    vc[page, offset] = v + 1
    keys, values = (c[table].flatten(1, 2).transpose(1, 2) for c in (kc, vc))
    mask = torch.arange(keys.shape[2]) < lens[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None] * 0.5, keys, values, attn_mask=mask[:, None, None], enable_gqa=True
    )
    return torch.relu(out.squeeze(2)) + 1


@pytest.mark.parametrize("level", ["full", "attention"])
def test_a_model_in_plain_pytorch_is_found_and_rewritten(level: str) -> None:
    compiled = torch.compile(plain, backend="tcport", fullgraph=True, dynamic=True, options={"level": level})
    for size in (3, 4):
        check(compiled, batch(size, seed=size))
    report = tcport.last_report()
    assert report is not None
    graph = report.graphs[0]
    assert sorted(f.detail.partition(";")[0] for f in graph.found) == ["kv_write", "paged_attention"]
    merged = ["kv_write", "paged_attention"] if level == "attention" else ["write_and_attend"]
    assert sorted(n.op for n in graph.nodes) == merged
    assert graph.left_alone == []
    assert "found sdpa: paged_attention" in str(report)


def test_what_is_left_alone_is_left_with_a_reason_and_right() -> None:
    def dropout(q: Tensor, kc: Tensor, table: Tensor) -> Tensor:
        keys = kc[table].flatten(1, 2).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None], keys, keys, dropout_p=1.0, enable_gqa=True
        )

    args = batch(3)
    report = tcport.explain(dropout, args[0], args[3], args[5])
    assert report.nodes == []
    assert next(left.reason for left in report.graphs[0].left_alone).startswith("[dropout]")


def prompt(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor) -> Tensor:
    """A whole prompt ``q [1, Hq, S, D]`` against its pages, causal by position."""
    keys, values = (c[table].flatten(1, 2).transpose(1, 2) for c in (kc, vc))
    causal = torch.arange(keys.shape[2]) <= torch.arange(q.shape[2])[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=causal, enable_gqa=True)


def test_a_prompt_is_rewritten_under_a_guard_that_its_keys_were_gathered() -> None:
    """Positions 0..S-1 are all keys only while S <= pages * page size: beyond that, PyTorch sees the gathered ones."""
    _, _, _, kc, vc, table, _, _ = batch(1)
    compiled = torch.compile(prompt, backend="tcport", fullgraph=True, dynamic=True)
    rewritten = []
    for tokens in (7, 20, 21):
        q = torch.randn(1, HEADS, tokens, DIM)
        torch.testing.assert_close(compiled(q, kc, vc, table), prompt(q, kc, vc, table), rtol=1e-4, atol=1e-5)
        report = tcport.last_report()
        assert report is not None
        rewritten.append(len(report.graphs[0].found))
    assert rewritten == [1, 1, 0]
    assert "a causal mask from position 0 may reach past" in str(report)
