"""Case A20: after a warm-up, no batch size, length, table width or offset of a live request compiles anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from test_chain_compiled import expected, serve
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tcport
from tcport import chain
from tcport._inductor import compile_count
from tcport.device import catalogue_profile
from tcport.kernels.call import AttentionCall, Launcher, WriteCall
from tcport.kernels.offline import record, specialise
from tcport.lowering.operators import KV_WRITE, PAGED_ATTENTION, Operator, choose, choose_for
from tcport.lowering.spec import attention_spec, opened

BATCHES, LENGTHS, PAGE = (1, 2, 3, 7, 15, 16, 17, 33, 64), (1, 15, 16, 17, 1000, 4096), 4
WARM_UP = ((3, 4, 0), (5, 6, 1), (1, 4, 0), (1, 6, 1), (3, 1, 0), (5, 1, 1), (1, 1, 0))
"""Batch, table width and offset: to torch.compile a size of 1 is code of its own, and two others make it share one."""


def shifted(tensor: Tensor, shift: int) -> Tensor:
    """The same numbers ``shift`` elements into their storage: no address of theirs is aligned."""
    return torch.cat([tensor.new_zeros(shift), tensor.flatten()])[shift:].view(tensor.shape)


def request(size: int, width: int, length: int, shift: int) -> list[Tensor]:
    """A decode step whose table and lengths lie ``shift`` elements into their storage."""
    table = torch.randint(size, (size, width)).int()
    table[:, (length - 1) // PAGE] = torch.arange(size)
    lens = torch.full((size,), length)
    caches = (torch.randn(64, PAGE, 2, 16) for _ in range(2))
    return [
        *(torch.randn(size, heads, 16) for heads in (4, 2, 2)),
        *caches,
        shifted(table, shift),
        shifted(lens, shift),
    ]


def check(compiled: object, args: list[Tensor]) -> None:
    want = expected(args)
    torch.testing.assert_close(compiled(*args), want, rtol=1e-4, atol=1e-4)  # type: ignore[operator]  # 4096 keys


def test_no_request_compiles_a_graph() -> None:
    compiled = torch.compile(serve, backend="tcport", fullgraph=True)
    for size, width, shift in WARM_UP:
        check(compiled, request(size, width, 1, shift))
    graphs, seen = compile_count(), len(tcport.history.fallbacks())
    for size, length in itertools.product(BATCHES, LENGTHS):
        pages = -(-length // PAGE)
        for width, shift in ((pages, 0), (pages + 1, 1)):
            check(compiled, request(size, width, length, shift))
    assert compile_count() == graphs
    assert len(tcport.history.fallbacks()) == seen


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(size: int, keys: int, tokens: int | None = None) -> AttentionCall:
    """A call of ``size`` sequences; with ``tokens``, that many query tokens of them all."""
    caches = [empty(65536, 16, 8, 128) for _ in range(2)]
    tables = empty(size, -(-keys // 16) + 1, dtype=torch.int32), empty(size, dtype=torch.int32)
    starts = None if tokens is None else empty(size + 1, dtype=torch.int32)
    return AttentionCall.of(empty(tokens or size, 32, 128), *caches, *tables, starts)


def write(tokens: int) -> WriteCall:
    caches = [empty(65536, 16, 8, 128) for _ in range(2)]
    return WriteCall.of(empty(tokens, 8, 128), empty(tokens, 8, 128), *caches, empty(tokens, dtype=torch.int64))


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[tuple[str, str]]]:
    """What Triton would compile for eager calls on an H200: each binary's kernel, and all that its cache keys it by."""
    monkeypatch.setattr(chain, "device_profile", lambda device: catalogue_profile("h200"))

    def eager(operator: Operator, call: object, launch: Launcher) -> None:
        monkeypatch.setattr(chain, "_launch", launch)
        chain.run(operator, call)

    def compiled(operator: Operator, call: object, aligned: bool = True) -> set[tuple[str, str]]:
        found = set()
        for launch in record(lambda call, launch: eager(operator, call, launch), call):
            known = specialise(launch, aligned=True)
            moving = () if aligned else ("block_table", "seq_lens", "cu_seqlens_q", "slot_mapping")
            kept = [name for name in known.aligned if name not in moving]
            key = f"{known.signature} {known.constants} {kept} {launch.options}"
            found.add((launch.kernel.__name__, key))
        return found

    return compiled


def names(found: set[tuple[str, str]]) -> list[str]:
    return sorted(name for name, _ in found)


WHOLE_AND_SPLIT = ["combine_kernel", "paged_attention_kernel", "paged_attention_kernel"]


@pytest.mark.parametrize("aligned", [True, False])
def test_eager_decode_compiles_six_kernels_for_every_batch_and_length(compiled_by, aligned: bool) -> None:
    """For small batches, for whole sequences, for equal numbers of parts, for parts by the lengths, and two merges."""
    found: set[tuple[str, str]] = set()
    for size, keys in itertools.product(range(1, 65), LENGTHS):
        found |= compiled_by(PAGED_ATTENTION, attention(size, keys), aligned)
    assert names(found) == sorted(
        [*WHOLE_AND_SPLIT, "combine_kernel", "paged_attention_kernel", "paged_attention_kernel"]
    )
    # Four calls warm all of it up: one sequence and many with a short table, and one and two with a long one.
    calls = (attention(*sizes) for sizes in ((1, 16), (17, 16), (1, 4096), (2, 4096)))
    warm = set().union(*(compiled_by(PAGED_ATTENTION, call) for call in calls))
    assert aligned is False or warm == found


def test_small_decode_batches_take_one_tile_that_covers_their_keys(compiled_by) -> None:
    """On an H200 one sequence of 128 keys took 3.7 us so, and 5.7 us cut in two and merged."""
    sizes = [(1, 16), (1, 112), (3, 50), (16, 16)]  # the table of ``attention`` has a page more than the keys
    (only,) = set().union(*(compiled_by(PAGED_ATTENTION, attention(*each)) for each in sizes))
    assert "'BLOCK_N': 128" in only[1]
    for size, keys in ((1, 113), (17, 112)):
        assert only not in compiled_by(PAGED_ATTENTION, attention(size, keys))


def test_eager_prompts_and_drafts_compile_four_kernels(compiled_by) -> None:
    """On Hopper: its own kernel for prompts, and those of the plain one for drafts."""
    found: set[tuple[str, str]] = set()
    for size, keys, per_sequence in itertools.product((1, 2, 7, 16, 64), LENGTHS, (1, 2, 5, 512)):
        found |= compiled_by(PAGED_ATTENTION, attention(size, keys, size * per_sequence))
    assert names(found) == sorted([*WHOLE_AND_SPLIT, "hopper_attention_kernel"])


def test_eager_writes_compile_one_kernel(compiled_by) -> None:
    found: set[tuple[str, str]] = set()
    for tokens in (*range(1, 65), 512, 8192):
        found |= compiled_by(KV_WRITE, write(tokens))
    assert names(found) == ["kv_write_kernel"]


@pytest.mark.parametrize("tokens", [None, 33])
def test_eager_calls_choose_as_compiled_code_with_open_sizes(tokens: int | None) -> None:
    chosen: list[str] = []
    profile = catalogue_profile("h200")

    def traced(*args: Tensor) -> Tensor:
        call = AttentionCall.of(*args)
        chosen[:] = map(str, choose(PAGED_ATTENTION, call, profile).selection.candidates)
        return args[0]

    call = attention(5, 300, tokens)
    names = ("query", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    args = [getattr(call, name) for name in names if getattr(call, name) is not None]
    make_fx(traced, tracing_mode="symbolic")(*args)
    eager = choose_for(PAGED_ATTENTION, opened(attention_spec(call)), profile)
    assert list(map(str, eager.selection.candidates)) == chosen
    assert chosen[0].startswith(("triton_decode [tuned] 16x32 w1 st3", "hopper_prefill [tuned] 128x128 w4 st2"))
