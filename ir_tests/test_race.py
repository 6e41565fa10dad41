"""Several kernels asked for: Inductor's own autotuning chooses, and a kernel that fails is left before the race."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fault_injection import TILES, Faulty, FaultyWrite, installed, installed_write, raising
from test_chain_compiled import expected, new_tokens, serve, state
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tcport
from tcport import quarantine
from tcport.errors import KernelBuildError, NoCandidateError, OptionError
from tcport.ir import TileConfig
from tcport.kernels import reference
from tcport.lowering import example as lowering_example
from tcport.lowering.operators import MERGE_STATES, PAGED_ATTENTION, WRITE_AND_ATTEND
from tcport.report import NodeReport

FRESH = {"force_disable_caches": True}
REFUSED = KernelBuildError("ptxas fatal: injected.", "None.")


@pytest.fixture(autouse=True)
def _no_failure_remembered() -> Iterator[None]:
    quarantine.clear()
    counters.clear()
    yield
    quarantine.clear()


def attend(q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> Any:
    return tcport.paged_attention(q, kc, vc, table, lens)


def slow(*tiles: TileConfig, name: str = "faulty") -> Faulty:
    """A kernel whose every call of these tiles takes 30 ms longer."""
    return Faulty(lambda tile: time.sleep(0.03) if tile in tiles else None, name)


def attended(options: dict[str, Any], mode: str | None = None) -> NodeReport:
    """How attention was lowered; its result is right."""
    torch.compiler.reset()
    q, kc, vc, table, lens = new_tokens()[0], *state()
    given = {"mode": mode} if mode else {"options": {**FRESH, **options}}
    out = torch.compile(attend, backend="tcport", fullgraph=True, **given)(q, kc, vc, table, lens)
    torch.testing.assert_close(out, reference.paged_attention(q, kc, vc, table, lens)[0], rtol=1e-5, atol=1e-5)
    report = tcport.last_report()
    assert report is not None
    return report.nodes[0]


def test_of_the_kernels_that_are_named_the_fastest_is_taken() -> None:
    first, second = slow(*TILES), Faulty(lambda tile: None, "second")
    with installed(first, 9), installed(second, 1):
        node = attended({"kernel": ["faulty", "second"]})
        assert node.kernel == "second"
        assert node.why == "the fastest of 6 that Inductor timed"
        assert node.chain[0].startswith("second")
        assert set(first.calls) == set(TILES)
        assert counters["inductor"]["select_algorithm_autotune"] == 1


def test_of_the_tiles_of_one_kernel_the_fastest_is_taken_under_max_autotune() -> None:
    with installed(slow(TILES[0], TILES[2])) as kernel:
        assert attended({"max_autotune": True}).tile == str(TILES[1])
        assert attended({}).tile == str(TILES[0])  # otherwise the chain's order decides
        kernel.calls.clear()
        assert attended({"kernel": "faulty"}).tile == str(TILES[0])
        assert TILES[1] not in kernel.calls


def test_plain_pytorch_takes_part_where_it_is_named() -> None:
    with installed(slow(*TILES)):
        assert attended({"max_autotune": True}).kernel == "faulty"
        assert attended({"kernel": ["faulty", "torch_attention"]}).kernel == "torch_attention"


def test_the_timings_are_kept_and_used_again() -> None:
    options = {"max_autotune": True, "force_disable_caches": False, "fx_graph_cache": False}
    with installed(slow(TILES[0], name="timed_once")) as kernel:
        assert attended(options).tile != str(TILES[0])
        timed = len(kernel.calls)
        assert attended(options).tile != str(TILES[0])
        # Once to see whether it works, and once where the winner is traced; the timings are Inductor's kept ones.
        assert len(kernel.calls) - timed == len(TILES) + 1
        assert counters["inductor"]["select_algorithm_autotune"] == 1


def test_a_write_and_an_attention_race_as_pairs() -> None:
    args = [*new_tokens(), *state()]
    want = expected(args)
    sleepy = FaultyWrite(lambda: time.sleep(0.03))
    with installed(slow(TILES[0], TILES[1])), installed_write(sleepy):
        options = {"max_autotune": True, **FRESH}
        out = torch.compile(serve, backend="tcport", fullgraph=True, options=options)(*args)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    report = tcport.last_report()
    assert report is not None
    assert [(n.kernel, n.tile) for n in report.nodes] == [("cpp_write+faulty", str(TILES[2]))]


def test_a_kernel_that_fails_is_left_before_the_race_and_recorded() -> None:
    with installed(Faulty(raising(REFUSED, TILES[:1]))) as kernel:
        assert attended({"max_autotune": True}).tile in map(str, TILES[1:])
        report = tcport.last_report()
        assert report is not None
        assert [(f.kernel, f.cause) for f in report.graphs[0].fallbacks] == [("faulty [tuned] 64x64 w4 st3", "build")]
        assert kernel.calls.count(TILES[0]) == 1
        quarantine.clear()
        with pytest.raises(KernelBuildError, match="Drop the option 'strict'"):
            attended({"max_autotune": True, "strict": True})


def test_when_all_that_race_fail_the_chain_goes_on() -> None:
    with installed(Faulty(raising(REFUSED))):
        assert attended({"max_autotune": True}).kernel == "torch_attention"
        quarantine.clear()
        with pytest.raises(KernelBuildError, match="No kernel is left"):
            attended({"kernel": ["faulty"]})


def test_names_are_checked() -> None:
    with installed(Faulty(lambda tile: None)):
        with pytest.raises(OptionError, match="no kernel named 'fault'.*Did you mean faulty"):
            attended({"kernel": ["torch_attention", "fault"]})
        with pytest.raises(OptionError, match="a kernel's name, or a list of names"):
            attended({"kernel": []})
        with pytest.raises(NoCandidateError, match="triton_decode"):
            attended({"kernel": ["triton_decode", "triton_prefill"]})


def test_a_mode_of_torch_compile_asks_for_a_race_too() -> None:
    with installed(slow(TILES[0], TILES[2], name="by_mode")):
        assert attended({}, mode="max-autotune-no-cudagraphs").tile == str(TILES[1])


def test_the_example_is_a_legal_call_on_a_cache_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 4 * 2 * 16 * 4
    monkeypatch.setattr(lowering_example, "CACHE_BYTES", 5 * page_bytes)
    k_cache, v_cache = torch.randn(2, 8, 4, 2, 16)
    new = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    table, bounds = torch.full((2, 6), 99), torch.tensor([0, 1, 3])
    query, lens, slots = torch.randn(3, 4, 16), torch.tensor([1, 2]), torch.tensor([-1, 99, 99])
    mask = torch.zeros(3, 24, dtype=torch.bool)
    call = WRITE_AND_ATTEND.call(query, *new, k_cache, v_cache, slots, table, lens, bounds, mask=mask)
    made = lowering_example.example(call)
    assert made is not None
    assert made.attend.k_cache.shape == (5, 4, 2, 16)
    assert made.write.k_cache is made.attend.k_cache
    assert made.attend.block_table.unique().tolist() == [0, 1, 2, 3, 4]
    assert made.attend.seq_lens.tolist() == [24, 24]
    assert made.attend.cu_seqlens_q.tolist() == [0, 1, 3]
    assert made.write.slot_mapping.tolist() == [0, 1, 2]
    assert made.attend.mask.all()
    for like, tensor in ((query, made.attend.query), (new[0], made.write.key), (table, made.attend.block_table)):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    latent = PAGED_ATTENTION.call(query[:2], k_cache, k_cache[..., :8], table, lens)
    assert lowering_example.example(latent, v_is_view_of_k=True).v_is_view_of_k


def test_where_a_size_is_unknown_nobody_races() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = shapes.create_unbacked_symint()
        parts = [torch.empty(tokens, 4, 16), torch.empty(tokens, 4)]
    assert lowering_example.example(MERGE_STATES.call(*parts, *parts)) is None
