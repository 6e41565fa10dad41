"""Every wrong argument is refused with the error of its cause: by the eager operator, by fakes, by symbolic fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tcport
from tcport import operator_library
from tcport.errors import (
    ArgumentError,
    DeviceMismatchError,
    DtypeError,
    HeadRatioError,
    ShapeError,
    TcportError,
)

Arguments = dict[str, Any]
# Names of sizes: 5 sequences, 7 tokens, 6 query heads, 2 KV heads, 9 pages of 4, head dims 16 and 12.
SEQS, TOKENS, Q_HEADS, KV_HEADS, PAGES, PAGE, K_DIM, V_DIM = 5, 7, 6, 2, 9, 4, 16, 12


def attention(**changes: Any) -> Arguments:
    """Valid arguments of the varlen form, and what a case changes in them."""
    return {
        "query": torch.randn(TOKENS, Q_HEADS, K_DIM),
        "k_cache": torch.randn(PAGES, PAGE, KV_HEADS, K_DIM),
        "v_cache": torch.randn(PAGES, PAGE, KV_HEADS, V_DIM),
        "block_table": torch.zeros(SEQS, 3, dtype=torch.int32),
        "seq_lens": torch.full((SEQS,), 3),
        "cu_seqlens_q": torch.tensor([0, 2, 3, 4, 6, 7]),
        **changes,
    }


def write(**changes: Any) -> Arguments:
    return {
        "key": torch.randn(TOKENS, KV_HEADS, K_DIM),
        "value": torch.randn(TOKENS, KV_HEADS, V_DIM),
        "k_cache": torch.randn(PAGES, PAGE, KV_HEADS, K_DIM),
        "v_cache": torch.randn(PAGES, PAGE, KV_HEADS, V_DIM),
        "slot_mapping": torch.arange(TOKENS),
        **changes,
    }


def merge(**changes: Any) -> Arguments:
    out, lse = torch.randn(TOKENS, Q_HEADS, V_DIM), torch.randn(TOKENS, Q_HEADS)
    return {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse, **changes}


def caches(dtype: torch.dtype, heads: int = KV_HEADS) -> Arguments:
    return {
        "k_cache": torch.zeros(PAGES, PAGE, heads, K_DIM).to(dtype),
        "v_cache": torch.zeros(PAGES, PAGE, heads, V_DIM).to(dtype),
    }


# operator, what is wrong, error class, a part of the message that names it
BAD: list[tuple[Callable[..., Any], Arguments, type[TcportError], str]] = [
    (tcport.paged_attention, attention(query=torch.randn(TOKENS, K_DIM)), ShapeError, "query has shape [7, 16]"),
    (
        tcport.paged_attention,
        attention(query=torch.randn(1, TOKENS, 6, 16)),
        ShapeError,
        "query has shape [1, 7, 6, 16]",
    ),
    (
        tcport.paged_attention,
        attention(k_cache=torch.randn(PAGES, PAGE, 32)),
        ShapeError,
        "k_cache has shape [9, 4, 32]",
    ),
    (tcport.paged_attention, attention(v_cache=torch.randn(PAGES, 2)), ShapeError, "v_cache has shape [9, 2]"),
    (tcport.paged_attention, attention(block_table=torch.zeros(SEQS).int()), ShapeError, "block_table has shape [5]"),
    (tcport.paged_attention, attention(seq_lens=torch.tensor(3)), ShapeError, "seq_lens has shape []"),
    (
        tcport.paged_attention,
        attention(cu_seqlens_q=torch.zeros(2, 3).int()),
        ShapeError,
        "cu_seqlens_q has shape [2, 3]",
    ),
    (tcport.paged_attention, attention(mask=torch.ones(4, TOKENS, 8).bool()), ShapeError, "mask has shape [4, 7, 8]"),
    (tcport.paged_attention, attention(query=torch.ones(7, 6, 16).int()), DtypeError, "query has dtype torch.int32"),
    (tcport.paged_attention, attention(query=torch.ones(7, 6, 16).bfloat16()), DtypeError, "torch.bfloat16"),
    (tcport.paged_attention, attention(query=torch.ones(7, 6, 16).double()), DtypeError, "torch.float64"),
    (
        tcport.paged_attention,
        attention(block_table=torch.zeros(5, 3)),
        DtypeError,
        "block_table has dtype torch.float32",
    ),
    (tcport.paged_attention, attention(seq_lens=torch.ones(5).short()), DtypeError, "seq_lens has dtype torch.int16"),
    (
        tcport.paged_attention,
        attention(cu_seqlens_q=torch.zeros(6)),
        DtypeError,
        "cu_seqlens_q has dtype torch.float32",
    ),
    (tcport.paged_attention, attention(mask=torch.ones(TOKENS, 8)), DtypeError, "mask has dtype torch.float32"),
    (tcport.paged_attention, attention(**caches(torch.uint8)), DtypeError, "k_cache has dtype torch.uint8"),
    (
        tcport.paged_attention,
        attention(k_cache=torch.zeros(9, 4, 2, 16).half()),
        DtypeError,
        "v_cache has torch.float32",
    ),
    (tcport.paged_attention, attention(sinks=torch.zeros(6).int()), DtypeError, "sinks has dtype torch.int32"),
    (tcport.paged_attention, attention(alibi_slopes=torch.zeros(6).int()), DtypeError, "alibi_slopes has dtype"),
    (tcport.paged_attention, attention(k_scale=torch.tensor(1)), DtypeError, "k_scale has dtype torch.int64"),
    (tcport.paged_attention, attention(query=torch.randn(7, 5, 16)), HeadRatioError, "query has 5 heads"),
    (tcport.paged_attention, attention(query=torch.randn(7, 1, 16)), HeadRatioError, "query has 1 heads"),
    (tcport.paged_attention, attention(query=torch.randn(7, 0, 16)), ShapeError, "at least 1 head"),
    (tcport.paged_attention, attention(query=torch.randn(7, 6, 8)), ShapeError, "the head dim: 8 and 16"),
    (tcport.paged_attention, attention(v_cache=torch.randn(8, 4, 2, 12)), ShapeError, "pages: 9 and 8"),
    (tcport.paged_attention, attention(v_cache=torch.randn(9, 8, 2, 12)), ShapeError, "page size: 4 and 8"),
    (tcport.paged_attention, attention(v_cache=torch.randn(9, 4, 3, 12)), ShapeError, "KV heads: 2 and 3"),
    (tcport.paged_attention, attention(**caches(torch.float32, heads=0)), ShapeError, "KV heads must be at least 1"),
    (
        tcport.paged_attention,
        attention(block_table=torch.zeros(4, 3).int()),
        ShapeError,
        "number of sequences: 4 and 5",
    ),
    (tcport.paged_attention, attention(cu_seqlens_q=None), ShapeError, "7 tokens for 5 sequences"),
    (tcport.paged_attention, attention(cu_seqlens_q=torch.zeros(5).int()), ShapeError, "5 entries for 5 sequences"),
    (tcport.paged_attention, attention(mask=torch.ones(5, 8).bool()), ShapeError, "number of tokens: 5 and 7"),
    (tcport.paged_attention, attention(sinks=torch.zeros(2)), ShapeError, "number of query heads: 2 and 6"),
    (tcport.paged_attention, attention(sinks=torch.zeros(1, 6)), ShapeError, "sinks has shape [1, 6]"),
    (tcport.paged_attention, attention(alibi_slopes=torch.zeros(5)), ShapeError, "number of query heads: 5 and 6"),
    (tcport.paged_attention, attention(k_scale=torch.ones(3)), ShapeError, "k_scale has shape [3]"),
    (tcport.paged_attention, attention(k_scale=torch.ones(6)), ShapeError, "k_scale has shape [6]"),
    (tcport.paged_attention, attention(v_scale=torch.ones(9, 4)), ShapeError, "v_scale has shape [9, 4]"),
    (tcport.paged_attention, attention(v_scale=torch.ones(9, 4, 3)), ShapeError, "v_scale has shape [9, 4, 3]"),
    (tcport.paged_attention, attention(window=0), ArgumentError, "window is 0"),
    (tcport.paged_attention, attention(window=-1), ArgumentError, "window is -1"),
    (tcport.paged_attention, attention(chunk=0), ArgumentError, "chunk is 0"),
    (tcport.paged_attention, attention(num_splits=0), ArgumentError, "num_splits is 0"),
    (tcport.paged_attention, attention(softcap=-1.0), ArgumentError, "softcap is -1.0"),
    (tcport.paged_attention, attention(softcap=float("inf")), ArgumentError, "softcap is inf"),
    (tcport.paged_attention, attention(scale=float("nan")), ArgumentError, "scale is nan"),
    (tcport.paged_attention, attention(scale=float("-inf")), ArgumentError, "scale is -inf"),
    (tcport.paged_attention, attention(**caches(torch.int8)), ArgumentError, "k_scale is missing"),
    (tcport.paged_attention, attention(**caches(torch.int8), k_scale=1.0), ArgumentError, "v_scale is missing"),
    (tcport.paged_attention, attention(out=torch.empty(7, 6, 16)), ShapeError, "dimension 2: 16 and 12"),
    (tcport.paged_attention, attention(out=torch.empty(7, 6, 12).half()), DtypeError, "out has dtype torch.float16"),
    (tcport.paged_attention, attention(out=torch.empty(7, 72)), ShapeError, "out has shape [7, 72]"),
    (
        tcport.paged_attention,
        attention(out=torch.empty(7, 6, 12, device="meta")),
        DeviceMismatchError,
        "query on cpu, out on meta",
    ),
    (
        tcport.paged_attention,
        attention(out=torch.empty(1, 6, 12).expand(7, -1, -1)),
        ArgumentError,
        "out has shape [7, 6, 12] with strides [0, 12, 1]",
    ),
    (
        tcport.paged_attention,
        attention(v_cache=torch.tensor(1.0), out=torch.empty(7, 6, 12)),
        ShapeError,
        "v_cache has shape []",
    ),
    (tcport.shared_prefix_attention, attention(shared_pages=-1), ArgumentError, "shared_pages is -1"),
    (tcport.shared_prefix_attention, attention(shared_pages=4), ArgumentError, "shared_pages is 4; block_table has 3"),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, block_table=torch.zeros(SEQS).int()),
        ShapeError,
        "block_table has shape [5]",
    ),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, block_table=torch.tensor(0)),
        ShapeError,
        "block_table has shape []",
    ),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, k_cache=torch.randn(9)),
        ShapeError,
        "k_cache has shape [9]",
    ),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, seq_lens=torch.ones(SEQS).bool()),
        DtypeError,
        "seq_lens has dtype torch.bool",
    ),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, seq_lens=torch.tensor(3)),
        ShapeError,
        "seq_lens has shape []",
    ),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, query=torch.tensor(3.0)),
        ShapeError,
        "query has shape []",
    ),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, seq_lens=torch.full((SEQS,), 3, device="meta")),
        DeviceMismatchError,
        "seq_lens on meta",
    ),
    (
        tcport.shared_prefix_attention,
        attention(shared_pages=1, cu_seqlens_q=torch.tensor([0, 7])),
        ShapeError,
        "cu_seqlens_q has 2 entries",
    ),
    (
        tcport.kv_write,
        write(k_cache=torch.zeros(1, PAGE, KV_HEADS, K_DIM).expand(PAGES, -1, -1, -1)),
        ArgumentError,
        "k_cache has shape [9, 4, 2, 16] with strides [0, 32, 16, 1]",
    ),
    (
        tcport.kv_write,
        write(v_cache=torch.zeros(PAGES, PAGE, 1, V_DIM).expand(-1, -1, KV_HEADS, -1)),
        ArgumentError,
        "elements share memory",
    ),
    (tcport.kv_write, write(key=torch.randn(7, 32)), ShapeError, "key has shape [7, 32]"),
    (tcport.kv_write, write(slot_mapping=torch.zeros(7, 1).int()), ShapeError, "slot_mapping has shape [7, 1]"),
    (tcport.kv_write, write(value=torch.randn(6, 2, 12)), ShapeError, "number of tokens: 7 and 6"),
    (tcport.kv_write, write(slot_mapping=torch.arange(8)), ShapeError, "8 entries for 7 tokens"),
    (tcport.kv_write, write(key=torch.randn(7, 3, 16)), ShapeError, "KV heads: 3 and 2"),
    (tcport.kv_write, write(value=torch.randn(7, 2, 16)), ShapeError, "head dim: 16 and 12"),
    (tcport.kv_write, write(key=torch.ones(7, 2, 16).int()), DtypeError, "key has dtype torch.int32"),
    (tcport.kv_write, write(slot_mapping=torch.zeros(7)), DtypeError, "slot_mapping has dtype torch.float32"),
    (tcport.kv_write, write(**caches(torch.int8)), ArgumentError, "k_scale is missing"),
    (tcport.kv_write, write(v_scale=torch.ones(4)), ShapeError, "v_scale has shape [4]"),
    (tcport.merge_states, merge(out_a=torch.randn(7, 12)), ShapeError, "out_a has shape [7, 12]"),
    (tcport.merge_states, merge(lse_b=torch.randn(0)), ShapeError, "lse_b has shape [0]"),
    (tcport.merge_states, merge(out_b=torch.randn(7, 6, 16)), ShapeError, "dimension 2: 12 and 16"),
    (tcport.merge_states, merge(lse_b=torch.randn(7, 5)), ShapeError, "dimension 1: 6 and 5"),
    (tcport.merge_states, merge(lse_a=torch.randn(8, 6), lse_b=torch.randn(8, 6)), ShapeError, "dimension 0: 7 and 8"),
    (tcport.merge_states, merge(out_b=torch.randn(7, 6, 12).half()), DtypeError, "out_b has torch.float16"),
    (tcport.merge_states, merge(lse_a=torch.randn(7, 6).half()), DtypeError, "lse_a has dtype torch.float16"),
]
IDS = [f"{operator.__name__}: {message}" for operator, _, _, message in BAD]


def fake_arguments(arguments: Arguments, mode: FakeTensorMode, dynamic: bool) -> Arguments:
    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not dynamic:
            return mode.from_tensor(value)
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * value.dim())
        return mode.from_tensor(value, symbolic_context=context)

    return {name: fake(value) for name, value in arguments.items()}


@pytest.mark.parametrize(("operator", "arguments", "error", "message"), BAD, ids=IDS)
def test_real_and_fake_refuse_alike(
    operator: Callable[..., Any], arguments: Arguments, error: type[TcportError], message: str
) -> None:
    with pytest.raises(error) as real:
        operator(**arguments)
    assert type(real.value) is error
    assert message in real.value.cause
    assert real.value.remedy.endswith(".")

    with FakeTensorMode() as mode, pytest.raises(error) as fake:
        operator(**fake_arguments(arguments, mode, dynamic=False))
    assert (type(fake.value), str(fake.value)) == (error, str(real.value))

    with FakeTensorMode(shape_env=ShapeEnv()) as mode, pytest.raises(error) as symbolic:
        operator(**fake_arguments(arguments, mode, dynamic=True))
    assert type(symbolic.value) is error


@pytest.mark.parametrize("name", ["key", "value", "k_cache", "slot_mapping", "k_scale"])
def test_a_write_across_devices_is_refused(name: str) -> None:
    arguments = write(k_scale=torch.ones(KV_HEADS), v_scale=torch.ones(KV_HEADS))
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(DeviceMismatchError, match=f"{name} on meta"):
        tcport.kv_write(**arguments)


@pytest.mark.parametrize("name", ["query", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "sinks", "mask"])
def test_attention_across_devices_is_refused(name: str) -> None:
    arguments = attention(sinks=torch.zeros(Q_HEADS), mask=torch.ones(TOKENS, 8).bool())
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(DeviceMismatchError, match=f"{name} on meta"):
        tcport.paged_attention(**arguments)


def test_nothing_is_written_before_the_refusal() -> None:
    arguments = write(slot_mapping=torch.arange(8))
    before = arguments["k_cache"].clone(), arguments["v_cache"].clone()
    with pytest.raises(ShapeError):
        tcport.kv_write(**arguments)
    assert torch.equal(arguments["k_cache"], before[0])
    assert torch.equal(arguments["v_cache"], before[1])


@pytest.mark.parametrize(
    "arguments",
    [
        attention(),
        attention(query=torch.randn(5, 6, 16), cu_seqlens_q=None),
        attention(window=1, chunk=1, num_splits=1, softcap=0.5, scale=-1.0, mask=torch.ones(7, 0).bool()),
        attention(**caches(torch.int8), k_scale=0.5, v_scale=torch.ones(PAGES, PAGE, KV_HEADS)),
        attention(**caches(torch.float8_e4m3fn), query=torch.ones(7, 6, 16).half()),
        attention(k_scale=torch.ones(1), v_scale=torch.ones(KV_HEADS).half()),
    ],
)
def test_sizes_left_open_are_not_fixed_by_the_checks(arguments: Arguments) -> None:
    """Checking a fake with unbacked sizes must not branch on them: tokens, sequences, pages, table width."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        arguments = fake_arguments(arguments, mode, dynamic=False)
        tokens, seqs, pages = (env.create_unbacked_symint() for _ in range(3))
        arguments["query"] = torch.empty(tokens, *arguments["query"].shape[1:], dtype=arguments["query"].dtype)
        for name in ("k_cache", "v_cache"):
            cache = arguments[name]
            arguments[name] = torch.empty(pages, *cache.shape[1:], dtype=cache.dtype)
        for name in ("k_scale", "v_scale"):
            if isinstance(arguments.get(name), Tensor) and arguments[name].dim() == 3:
                arguments[name] = torch.empty(pages, PAGE, KV_HEADS)
        if arguments.get("mask") is not None:
            arguments["mask"] = torch.empty(tokens, 0, dtype=torch.bool)
        arguments["block_table"] = torch.empty(seqs, env.create_unbacked_symint(), dtype=torch.int32)
        arguments["seq_lens"] = torch.empty(seqs, dtype=torch.int32)
        if arguments["cu_seqlens_q"] is not None:
            arguments["cu_seqlens_q"] = torch.empty(seqs + 1, dtype=torch.int32)
        out = tcport.paged_attention(**arguments)
        assert out.shape == (arguments["query"].shape[0], Q_HEADS, V_DIM)


def test_a_postponed_refusal_leaves_a_plausible_result(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = attention(query=torch.randn(7, 5, 16))
    taken: list[TcportError] = []
    monkeypatch.setattr(operator_library, "_take", lambda error: taken.append(error) is None)
    with FakeTensorMode() as mode:
        out, lse = tcport.paged_attention(**fake_arguments(arguments, mode, dynamic=False), return_lse=True)
    assert (out.shape, lse.shape) == ((7, 5, 12), (7, 5))
    assert [type(error) for error in taken] == [HeadRatioError]
    with pytest.raises(HeadRatioError):
        tcport.paged_attention(**arguments)
