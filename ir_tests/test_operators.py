"""What the dispatcher knows of the operators: schema, fakes, autocast, autograd, mutation, tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import tcport
from tcport.errors import DtypeError, UnsupportedFeatureError
from tcport.kernels import reference
from tcport.testing import Recipe, assert_close, build_batch

Q_HEADS, KV_HEADS, DIM = 6, 2, 80


@pytest.fixture
def batch() -> dict[str, Any]:
    """Three sequences, two query tokens each, head dim 80: the query a slice of a fused QKV projection."""
    recipe = Recipe(
        lens=(5, 19, 2), q_lens=(2, 2, 2), heads=(Q_HEADS, KV_HEADS), dims=(DIM, DIM), strided_query=True, poison=0.0
    )
    return build_batch(recipe).arguments


def transposed(query: Tensor) -> Tensor:
    """The same tokens as a view of ``[batch, heads, sequence, dim]`` memory."""
    return query.unflatten(0, (3, 2)).transpose(1, 2).contiguous().transpose(1, 2).flatten(0, 1)


def test_attention_passes_opcheck_on_strided_inputs(batch: dict[str, Any]) -> None:
    arguments = {**batch, "sinks": torch.zeros(Q_HEADS), "return_lse": True}
    assert not arguments["query"].is_contiguous()
    torch.library.opcheck(torch.ops.tcport.paged_attention.default, (), arguments)
    head_major = {name: arguments[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
    torch.library.opcheck(
        torch.ops.tcport.paged_attention.default,
        (),
        {**arguments, **head_major, "query": transposed(arguments["query"]), "return_lse": False},
    )


def test_write_passes_opcheck_on_strided_inputs() -> None:
    fused = torch.randn(5, (Q_HEADS + 2 * KV_HEADS) * DIM)
    key, value = fused[:, Q_HEADS * DIM :].view(5, 2, KV_HEADS, DIM).unbind(1)
    k_cache = torch.randn(3, KV_HEADS, 4, DIM).transpose(1, 2)
    v_cache = torch.randn(3, 4, KV_HEADS, DIM + 16)[..., :DIM]
    arguments = (key, value, k_cache, v_cache, torch.tensor([3, -1, 11, 12]))
    torch.library.opcheck(torch.ops.tcport.kv_write.default, arguments, {"k_scale": torch.tensor(2.0)})


def test_merge_passes_opcheck() -> None:
    out, lse = torch.randn(4, Q_HEADS, DIM), torch.randn(Q_HEADS, 4).t()
    torch.library.opcheck(torch.ops.tcport.merge_states.default, (out, lse, out.clone(), lse.clone()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_of_the_result_are_right_in_compiled_code(batch: dict[str, Any], backend: str) -> None:
    """The layout the fake declares is the layout the operator returns, whatever the strides of the query."""

    def model(query: Tensor) -> Tensor:
        return tcport.paged_attention(**{**batch, "query": query}).transpose(0, 1).reshape(Q_HEADS, -1) + 1

    query = transposed(batch["query"])
    expected = reference.paged_attention(**{**arguments_of_reference(batch), "query": query})[0]
    actual = torch.compile(model, backend=backend, fullgraph=True)(query)
    assert_close(actual, expected.transpose(0, 1).reshape(Q_HEADS, -1) + 1)


def arguments_of_reference(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("num_splits", "batch_invariant")}


def test_the_result_goes_where_out_says(batch: dict[str, Any]) -> None:
    out = torch.full((6, DIM, Q_HEADS), torch.nan).transpose(1, 2)
    result, lse = tcport.paged_attention(**batch, out=out, return_lse=True)
    expected_out, expected_lse = reference.paged_attention(**arguments_of_reference(batch))
    assert result is out
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


class TestAutocast:
    @pytest.fixture(params=["eager", "compiled"], autouse=True)
    def _run(self, request: pytest.FixtureRequest) -> None:
        self.compiled = request.param == "compiled"

    def attention(self, arguments: dict[str, Any], query_dtype: torch.dtype, kv_dtype: torch.dtype) -> Tensor:
        """Under autocast to bf16; the result is checked against the reference on what must have met."""
        arguments = {
            **arguments,
            "query": arguments["query"].to(query_dtype),
            **{name: arguments[name].to(kv_dtype) for name in ("k_cache", "v_cache")},
        }

        def model(query: Tensor) -> Tensor:
            return tcport.paged_attention(**{**arguments, "query": query})

        run = torch.compile(model, backend="aot_eager", fullgraph=True) if self.compiled else model
        with torch.autocast("cpu", torch.bfloat16):
            out = run(arguments["query"])
        query = arguments["query"].to(out.dtype)
        expected = reference.paged_attention(**{**arguments_of_reference(arguments), "query": query})[0]
        assert_close(out, expected)
        return out

    @pytest.mark.parametrize(
        ("query_dtype", "kv_dtype", "meet"),
        [
            (torch.float32, torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32, torch.float32),
            (torch.bfloat16, torch.float16, torch.float16),
            (torch.float32, torch.float8_e4m3fn, torch.bfloat16),
            (torch.float16, torch.float8_e5m2, torch.bfloat16),
        ],
    )
    def test_query_and_cache_meet_in_one_dtype(
        self, batch: dict[str, Any], query_dtype: torch.dtype, kv_dtype: torch.dtype, meet: torch.dtype
    ) -> None:
        assert self.attention(batch, query_dtype, kv_dtype).dtype == meet

    def test_a_double_query_is_left_alone_and_refused(self, batch: dict[str, Any]) -> None:
        query = batch["query"].double()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(DtypeError, match=r"query has dtype torch\.float64"):
            tcport.paged_attention(**{**batch, "query": query})

    def test_a_write_takes_what_a_projection_gives(self) -> None:
        def model(x: Tensor, weight: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
            key = torch.nn.functional.linear(x, weight).view(3, KV_HEADS, DIM)
            tcport.kv_write(key, x.new_ones(3, KV_HEADS, DIM), k_cache, v_cache, torch.tensor([1, -1, 4]))

        x, weight = torch.randn(3, 32), torch.randn(KV_HEADS * DIM, 32)
        k_cache, v_cache = torch.zeros(2, 2, 3, KV_HEADS, DIM)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if self.compiled else model
        with torch.autocast("cpu", torch.bfloat16):
            run(x, weight, k_cache, v_cache)
        key = (x.bfloat16() @ weight.bfloat16().t()).float().view(3, KV_HEADS, DIM)
        expected = torch.zeros_like(k_cache)
        expected[0, 1], expected[1, 1] = key[0], key[2]
        assert torch.equal(k_cache, expected)
        assert torch.equal(v_cache, (expected != 0).float())


class TestGradients:
    @pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
    def test_forward_works_and_backward_is_refused(self, batch: dict[str, Any], backend: str | None) -> None:
        """A model compiled without ``no_grad`` traces a backward; only running it is an error."""
        weight = torch.nn.Parameter(torch.ones(DIM))
        sinks = torch.nn.Parameter(torch.zeros(Q_HEADS))

        def model(query: Tensor) -> Tensor:
            return tcport.paged_attention(**{**batch, "query": query * weight, "sinks": sinks}) + query

        run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        out = run(batch["query"])
        expected = reference.paged_attention(**{**arguments_of_reference(batch), "sinks": sinks.detach()})[0]
        assert_close(out, expected + batch["query"])
        with pytest.raises(UnsupportedFeatureError, match="tcport::paged_attention, which is for inference only"):
            out.sum().backward()

    def test_merge_states_refuses_too(self) -> None:
        out = torch.randn(2, 3, 4, requires_grad=True)
        merged, _ = tcport.merge_states(out, torch.zeros(2, 3), out, torch.zeros(2, 3))
        with pytest.raises(UnsupportedFeatureError, match="tcport::merge_states"):
            merged.sum().backward()

    def test_a_forward_derivative_is_refused(self, batch: dict[str, Any]) -> None:
        """By the transform and by dual tensors; the result would have no tangent, which reads as zero."""

        def attend(query: Tensor) -> Tensor:
            return tcport.paged_attention(**{**batch, "query": query})

        query = batch["query"]
        with pytest.raises(UnsupportedFeatureError, match="tcport::paged_attention, which is for inference only"):
            torch.func.jvp(attend, (query,), (torch.ones_like(query),))
        with forward_ad.dual_level():
            with pytest.raises(UnsupportedFeatureError, match="tcport::paged_attention"):
                attend(forward_ad.make_dual(query, torch.ones_like(query)))
            out, lse = torch.randn(2, 3, 4), forward_ad.make_dual(torch.zeros(2, 3), torch.ones(2, 3))
            with pytest.raises(UnsupportedFeatureError, match="tcport::merge_states"):
                tcport.merge_states(out, lse, out, torch.zeros(2, 3))
            assert attend(query).shape == query.shape

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_nothing_is_recorded_outside_grad_mode(self, batch: dict[str, Any], mode: Any) -> None:
        with mode():
            out = tcport.paged_attention(**{**batch, "sinks": torch.zeros(Q_HEADS, requires_grad=True)})
        assert not out.requires_grad

    def test_a_write_leaves_the_cache_without_history(self) -> None:
        key = torch.randn(2, KV_HEADS, DIM, requires_grad=True)
        k_cache, v_cache = torch.zeros(2, 1, 4, KV_HEADS, DIM)
        version = k_cache._version
        tcport.kv_write(key, key * 2, k_cache, v_cache, torch.tensor([2, 0]))
        assert not k_cache.requires_grad
        assert not v_cache.requires_grad
        assert k_cache._version > version
        assert torch.equal(k_cache[0, 2], key[0].detach())


class TestScalesGivenAsNumbers:
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_new_numbers_do_not_compile_again(self, batch: dict[str, Any], backend: str) -> None:
        counter = CompileCounterWithBackend(backend)

        def model(query: Tensor, scale: float) -> Tensor:
            return tcport.paged_attention(**{**batch, "query": query, "k_scale": scale, "v_scale": scale + 1})

        run = torch.compile(model, backend=counter, fullgraph=True)
        for scale in (1.0, 0.5, 2.0, 0.25, 3.0):
            options = {"k_scale": torch.tensor(scale), "v_scale": torch.tensor(scale + 1)}
            expected = reference.paged_attention(**{**arguments_of_reference(batch), **options})[0]
            assert_close(run(batch["query"], scale), expected)
        assert counter.frame_count <= 2

    def test_a_write_divides_by_the_number(self) -> None:
        k_cache, v_cache = torch.zeros(2, 1, 2, 1, 3, dtype=torch.int8)
        key = torch.tensor([[[1.0, 2.6, -300.0]]])
        tcport.kv_write(key, key, k_cache, v_cache, torch.tensor([1]), k_scale=1.0, v_scale=2.0)
        assert k_cache[0, 1, 0].tolist() == [1, 3, -128]
        assert v_cache[0, 1, 0].tolist() == [0, 1, -128]  # 0.5 and 1.3: to nearest, ties to even


class TestMergeStates:
    def test_two_halves_of_the_keys_give_the_whole(self) -> None:
        """Literal weights: equal LSE average the two; a difference of ln 3 weighs them 3 to 1."""
        a, b = torch.full((2, 1, 4), 1.0), torch.full((2, 1, 4), 5.0)
        lse_a, lse_b = torch.tensor([[0.5], [3.0]]), torch.tensor([[0.5], [3.0]])
        lse_a[1] += torch.tensor(3.0).log()
        out, lse = tcport.merge_states(a, lse_a, b, lse_b)
        assert_close(out, torch.tensor([3.0, 2.0]).view(2, 1, 1).expand(2, 1, 4))
        assert_close(lse, torch.tensor([[0.5], [3.0]]) + torch.tensor([[2.0], [4.0]]).log())

    @pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
    def test_an_empty_part_contributes_nothing(self, garbage: float) -> None:
        part, empty = torch.randn(3, 2, 4), torch.full((3, 2, 4), garbage)
        lse, nothing = torch.randn(3, 2), torch.full((3, 2), -torch.inf)
        for merged in (
            tcport.merge_states(part, lse, empty, nothing),
            tcport.merge_states(empty, nothing, part, lse),
        ):
            assert torch.equal(merged[0], part)
            assert torch.equal(merged[1], lse)

    def test_two_empty_parts_are_empty(self) -> None:
        nothing = torch.full((3, 2), -torch.inf)
        out, lse = tcport.merge_states(torch.full((3, 2, 4), torch.nan), nothing, torch.zeros(3, 2, 4), nothing)
        assert torch.equal(out, torch.zeros(3, 2, 4))
        assert torch.equal(lse, nothing)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_attention_over_two_caches_is_attention_over_both(self, dtype: torch.dtype) -> None:
        batch = build_batch(Recipe(lens=(30, 12), heads=(4, 2), dims=(16, 16), page=4, query_dtype=dtype)).arguments
        whole, whole_lse = reference.paged_attention(**arguments_of_reference(batch), compute_dtype=torch.float64)
        first = {**batch, "seq_lens": torch.tensor([8, 8]), "causal": False}
        second = {
            **batch,
            "block_table": batch["block_table"][:, 2:],
            "seq_lens": torch.tensor([22, 4]),
            "causal": False,
        }
        parts = (tcport.paged_attention(**part, return_lse=True) for part in (first, second))
        out, lse = tcport.merge_states(*(tensor for part in parts for tensor in part))
        assert out.dtype == dtype
        # An fp64 result can be no better than the fp32 LSE that weighs its parts.
        assert_close(out, whole, dtype=torch.float32 if dtype == torch.float64 else dtype)
        assert_close(lse, whole_lse, dtype=torch.float32)
