"""Query-key norm, rotary embedding and cache write as one operator: every spelling, near misses, whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

import tcport
from attention import canonical_attention, torch_attention
from llama import Llama, LlamaConfig
from tcport.device.catalog import catalogue_profile
from tcport.report import GraphReport
from tcport.testing import assert_equivalent, assert_no_clone, lower_on
from tcport.testing.graphs import interpreted

HEADS, KV_HEADS, DIM, PAGES, PAGE = 4, 2, 16, 12, 4
TOKENS = 3
TABLE = torch.tensor([[3, 0], [7, 1], [5, 2]], dtype=torch.int32)
LENS = torch.tensor([2, 5, 8], dtype=torch.int32)
SLOTS = torch.tensor([13, 4, 11])  # the last position of each sequence
ROPE = {"fuse_rope_write": 1, "merge_kv_write": 0, "write_in_place": 1}


def attend(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
    """``[T, H, D]``: write, then attend."""
    tcport.kv_write(k, v, kc, vc, SLOTS)
    return tcport.paged_attention(q, kc, vc, TABLE, LENS)


def inputs(dtype: torch.dtype = torch.float32, flat: bool = False) -> tuple[Tensor, ...]:
    """Query, key, value ``[T, heads, D]`` and two caches; ``flat``: ``[T, 1, heads * D]``."""
    rng = torch.Generator().manual_seed(5)
    shapes = [(TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    qkv = [torch.randn(*shape, generator=rng).to(dtype) for shape in shapes]
    caches = [torch.randn(PAGES, PAGE, KV_HEADS, DIM, generator=rng).to(dtype) for _ in "kv"]
    return (*(t.reshape(TOKENS, 1, -1) if flat else t for t in qkv), *caches)


def angles(width: int) -> Tensor:
    return torch.outer(torch.arange(1.0, TOKENS + 1), 0.7 ** torch.arange(width))


HALF_COS, HALF_SIN = angles(DIM // 2).repeat(1, 2).cos(), angles(DIM // 2).repeat(1, 2).sin()


class Qwen(nn.Module):
    """As transformers writes it: heads before tokens, norm of query and key, tables of each token."""

    def __init__(self, norm: Callable[..., nn.Module] | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(DIM, 1e-6) for _ in "qk") if norm else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*q.shape[:-1], -1, DIM)
        q, k, v = (t.view(shape) for t in (q, k, v))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return attend(*(t.transpose(1, 2).flatten(0, 1) for t in (q, k, v.transpose(1, 2))), kc, vc)


def chunked(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Query and key as one tensor."""
    heads = torch.cat((q, k), 1)
    first, second = heads.chunk(2, -1)
    q, k = (heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).split([HEADS, KV_HEADS], 1)
    return attend(q, k, v, kc, vc)


def interleaved(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turn(x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        c, s = cos[:, None], sin[:, None]
        return torch.stack((even * c - odd * s, odd * c + s * even), dim=-1).flatten(-2)

    return attend(turn(q), turn(k), v, kc, vc)


def by_complex(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, freqs: Tensor) -> Tensor:
    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[:, None]).flatten(-2).type_as(x)

    return attend(turn(q), turn(k), v, kc, vc)


def same_as_eager(fn: Callable[..., Tensor], *args: Tensor, tolerance: float, matches: dict[str, int]) -> GraphReport:
    """Results and caches of the passed graph against eager in fp64; the caches' other slots byte for byte."""
    report = GraphReport()
    wide = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    expected_args = [a.double() if a.is_floating_point() else a.to(torch.complex128) for a in copy.deepcopy(args)]
    expected = wide(*expected_args)
    ours = copy.deepcopy(args)
    with torch.no_grad():
        actual = interpreted(fn, report=report)(*ours)
    assert {p.name: p.matches for p in report.passes if p.name in matches} == matches, report.passes
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for now, was, want in zip(ours[3:5], args[3:5], expected_args[3:5], strict=True):
        torch.testing.assert_close(now.double(), want, rtol=tolerance, atol=tolerance)
        untouched = torch.ones(PAGES * PAGE, dtype=torch.bool).index_fill(0, SLOTS, False)
        assert torch.equal(now.flatten(0, 1)[untouched], was.flatten(0, 1)[untouched])
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm", [None, nn.RMSNorm, Qwen3RMSNorm])
def test_as_transformers_writes_it(norm: Callable[..., nn.Module] | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tables = HALF_COS[:, None].to(dtype), HALF_SIN[:, None].to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    args = (*inputs(dtype, flat=True), *tables)
    report = same_as_eager(Qwen(norm).to(dtype), *args, tolerance=tolerance, matches=ROPE)
    note = next(p.notes for p in report.passes if p.name == "fuse_rope_write")
    assert note[0].endswith("operations and a write became one" + (" with the norms" if norm else ""))


SPELLINGS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "query and key as one": (chunked, (HALF_COS, HALF_SIN)),
    "even and odd": (interleaved, (angles(DIM // 2).cos(), angles(DIM // 2).sin())),
    "complex": (by_complex, (torch.polar(torch.ones(TOKENS, DIM // 2), angles(DIM // 2)),)),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_spellings(name: str, dtype: torch.dtype) -> None:
    fn, tables = SPELLINGS[name]
    tables = tuple(t if t.is_complex() else t.to(dtype) for t in tables)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    same_as_eager(fn, *inputs(dtype), *tables, tolerance=tolerance, matches=ROPE)


@pytest.mark.parametrize("name", ["query and key as one", "even and odd"])
def test_the_same_arithmetic_gives_the_same_caches(name: str) -> None:
    fn, tables = SPELLINGS[name]
    assert_equivalent(fn, *inputs(), *tables, matches=ROPE, exact=True)


def test_compiled_nothing_is_copied() -> None:
    fn, tables = SPELLINGS["query and key as one"]
    args, expected_args = (*inputs(), *tables), (*inputs(), *tables)
    report = assert_no_clone(fn, *args)
    assert [(n.op, n.kernel) for n in report.nodes] == [
        ("rope_and_write", "torch_rope+cpp_write"), ("paged_attention", "cpp_attention"),
    ]  # fmt: skip
    actual = torch.compile(fn, backend="tcport", fullgraph=True)(*args)
    torch.testing.assert_close(actual, fn(*expected_args), rtol=1e-5, atol=1e-5)
    for a, b in zip(args[3:5], expected_args[3:5], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_compiled_it_is_found_behind_reshapes_and_views_that_come_late() -> None:
    """Inductor makes reshapes of views, and may compute those of the query after the write."""
    torch.manual_seed(0)
    tables = HALF_COS[:, None], HALF_SIN[:, None]
    with torch.no_grad():
        model = Qwen(nn.RMSNorm)
        args, expected_args = (*inputs(torch.float32, flat=True), *tables), (*inputs(torch.float32, flat=True), *tables)
        actual = torch.compile(model, backend="tcport", fullgraph=True)(*args)
        torch.testing.assert_close(actual, model(*expected_args), rtol=1e-5, atol=1e-5)
    for a, b in zip(args[3:5], expected_args[3:5], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    report = tcport.last_report()
    assert report is not None
    (fused,) = (p for p in report.graphs[0].passes if p.name == "fuse_rope_write")
    assert fused.matches == 1, fused.notes
    assert fused.saved_operations > 0


def test_a_gpu_gets_the_kernel_unless_the_cache_is_quantised() -> None:
    fn, tables = SPELLINGS["even and odd"]
    h200 = catalogue_profile("h200")
    args = [a.half() for a in (*inputs(), *tables)]
    write, attention = lower_on(h200, fn, *args)
    assert (write.op, write.kernel, attention.op) == ("rope_and_write", "triton_rope_write", "paged_attention")
    assert write.chain[-1].startswith("torch_rope+torch_write")
    caches = [c.to(torch.float8_e4m3fn) for c in args[3:5]]
    write, _ = lower_on(h200, fn, *args[:3], *caches, *args[5:])
    assert write.kernel == "torch_rope+triton_write"
    assert "it writes caches of 16 and 32 bit floats" in write.rejected[0].reason


def key_used_twice(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def turn(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin[:, None]

    k = turn(k)
    return attend(turn(q), k, v, kc, vc), k.sum()


def query_not_rotated(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = k.chunk(2, -1)
    return attend(q, k * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None], v, kc, vc)


def other_tables(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turn(x: Tensor, cos: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return attend(turn(q, cos), turn(k, cos * 2), v, kc, vc)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tables = [torch.stack((t, 2 * t), 1) for t in (cos, sin)]

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * tables[0] + torch.cat((-second, first), -1) * tables[1]

    return attend(turn(q[:, :2]), turn(k), v, kc, vc)


def unequal_parts(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turn(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin[:, None]

    return attend(turn(q), turn(k), v, kc, vc)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (key_used_twice, "uses the rotated"),
        (query_not_rotated, "its query is not rotated and the other one is"),
        (other_tables, "rotated by different tables"),
        (head_by_head, "the tables differ from head to head"),
        (unequal_parts, "its query: "),
    ],
)
def test_near_misses_are_left_with_the_reason_and_merged_as_ever(fn: Callable[..., Any], said: str) -> None:
    report = assert_equivalent(
        fn, *inputs(), HALF_COS, HALF_SIN, matches={"fuse_rope_write": 0, "merge_kv_write": 1, "write_in_place": 1}
    )
    assert said in next(p.notes for p in report.passes if p.name == "fuse_rope_write")[0]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def read(q: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
    return tcport.paged_attention(q, kc, vc, TABLE, LENS)


def query_computed_after_the_write(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    tcport.kv_write(turned(k, cos, sin), v, kc, vc, SLOTS)
    return read(turned(q * 2, cos, sin), kc, vc)


def query_from_the_written_cache(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    tcport.kv_write(turned(k, cos, sin), v, kc, vc, SLOTS)
    return read(turned(q + kc[0, :TOKENS].repeat(1, 2, 1), cos, sin), kc, vc)


def query_from_the_cache_as_it_was(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    q = q + kc[0, :TOKENS].repeat(1, 2, 1)
    tcport.kv_write(turned(k, cos, sin), v, kc, vc, SLOTS)
    return read(turned(q, cos, sin), kc, vc)


def query_computed_after_two_writes(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    tcport.kv_write(turned(k, cos, sin), v, kc, vc, SLOTS)
    tcport.kv_write(k, v * 2, kc, vc, SLOTS.flip(0))
    return read(turned(q * 2, cos, sin), kc, vc)


def attention_before_and_after_the_write(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    before = read(turned(q, cos, sin), kc, vc)
    return before, attend(turned(q + 1, cos, sin), turned(k, cos, sin), v, kc, vc)


def two_layers_on_one_cache(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    first = attend(turned(q, cos, sin), turned(k, cos, sin), v, kc, vc)
    return attend(turned(first, cos, sin), turned(k + 1, cos, sin), v - 1, kc, vc)


def snapshots_around_the_write(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    before = kc.clone()
    out = attend(turned(q, cos, sin), turned(k, cos, sin), v, kc, vc)
    return out, before, vc + 0


def cache_changed_between_write_and_query(q, k, v, kc, vc, cos, sin):  # type: ignore[no-untyped-def]
    tcport.kv_write(turned(k, cos, sin), v, kc, vc, SLOTS)
    vc[3] = 0
    return read(turned(q * 2, cos, sin), kc, vc)


ORDERS: dict[Callable[..., Any], int] = {
    query_computed_after_the_write: 1,
    query_from_the_written_cache: 0,
    query_from_the_cache_as_it_was: 1,
    query_computed_after_two_writes: 0,
    attention_before_and_after_the_write: 1,
    two_layers_on_one_cache: 2,
    snapshots_around_the_write: 1,
    cache_changed_between_write_and_query: 1,  # of the values: the keys are read as they were written
}


@pytest.mark.parametrize("fn", ORDERS, ids=lambda fn: fn.__name__)
def test_any_order_of_writes_and_reads_equals_eager(fn: Callable[..., Any]) -> None:
    """Caches byte for byte; with the fusions that are possible, and no others."""
    assert_equivalent(fn, *inputs(), HALF_COS, HALF_SIN, matches={"fuse_rope_write": ORDERS[fn]}, exact=True)


def test_a_head_dim_that_is_open_hides_nothing() -> None:
    """What one attention gives is what the next reads, and no weight says how many dims it has."""

    def two_layers(q: Tensor, *rest: Tensor) -> Tensor:
        return attend(attend(q, *rest), *rest)

    assert_equivalent(two_layers, *inputs(), dynamic=True, matches={"fuse_rope_write": 0, "write_in_place": 2})


@pytest.mark.parametrize("attention", [canonical_attention, torch_attention])
def test_a_whole_model_through_every_pass(attention: Any) -> None:
    """Two layers of the example, decoding: hidden states, tokens and caches, against the model in fp64."""
    config = LlamaConfig(97, 64, 96, 2, HEADS, KV_HEADS, DIM, 32)
    torch.manual_seed(1)
    model = Llama(config)
    model.attention = attention
    caches = [(torch.randn(PAGES, PAGE, KV_HEADS, DIM), torch.randn(PAGES, PAGE, KV_HEADS, DIM)) for _ in range(2)]
    wide = copy.deepcopy(model).double()
    model.attach_caches(copy.deepcopy(caches))
    wide.attach_caches([(k.double(), v.double()) for k, v in caches])
    report = GraphReport()
    run = interpreted(model.decode, report=report)
    step = (torch.tensor([3, 44, 96]), LENS.long() - 1, TABLE)
    with torch.no_grad():
        assert torch.equal(run(*step), wide.decode(*step))
    counts = {p.name: p.matches for p in report.passes}
    expected = {
        "fuse_rope_write": 2,
        "fuse_add_rms_norm": 3,
        "fuse_silu_mul": 2,
        "merge_kv_write": 0,
        "write_in_place": 2,
    }
    assert {name: counts[name] for name in expected} == expected
    for ours, theirs in zip(model.layers, wide.layers, strict=True):
        for name in ("k_cache", "v_cache"):
            a, b = (getattr(layer.attention, name) for layer in (ours, theirs))
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
