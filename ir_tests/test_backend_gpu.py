"""The backend on a CUDA GPU: results, the kernel that the generated code launches, graphs, and stepping down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tcport
from tcport.errors import KernelBuildError
from tcport.kernels import reference

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def decode(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor, slots: Tensor
) -> Tensor:
    tcport.kv_write(k, v, kc, vc, slots)
    return tcport.paged_attention(q * 0.5, kc, vc, table, lens)


def prefill(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor, cu_seqlens: Tensor) -> Tensor:
    return tcport.paged_attention(q * 0.5, kc, vc, table, lens, cu_seqlens)


def batch(size: int, dtype: torch.dtype, width: int = 9) -> list[Tensor]:
    pages = size * width + 3
    table = torch.randperm(pages)[: size * width].reshape(size, width).int()
    lens = torch.randint(1, width * PAGE + 1, (size,))
    last = lens - 1
    slots = table.long().gather(1, (last // PAGE)[:, None]).squeeze(1) * PAGE + last % PAGE
    shapes = (size, HEADS, DIM), (size, KV_HEADS, DIM), (size, KV_HEADS, DIM), *[(pages, PAGE, KV_HEADS, DIM)] * 2
    return [*(torch.randn(s, dtype=dtype).cuda() for s in shapes), table.cuda(), lens.cuda(), slots.cuda()]


def expected(args: list[Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v, kc, vc, table, lens, slots = (a.cpu() for a in args)
    reference.kv_write(k, v, kc, vc, slots)
    out, _ = reference.paged_attention(q * 0.5, kc, vc, table, lens)
    return out, kc


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decode_for_every_batch_compiles_at_most_twice(dtype: torch.dtype) -> None:
    compiled = torch.compile(decode, backend="tcport", fullgraph=True)
    with tcport.history.collected() as report:
        for size in (2, 3, 17, 64, 5):
            args = batch(size, dtype)
            out, k_cache = expected(args)
            got = compiled(*args)
            torch.testing.assert_close(got.cpu().float(), out, rtol=0, atol=TOLERANCE[dtype])
            assert torch.equal(args[3].cpu(), k_cache)
    assert len(report.graphs) <= 2
    for graph in report.graphs:
        assert [(n.kernel, n.tier) for n in graph.nodes] == [("triton_write+triton_decode", "tuned")]
        assert graph.clones == []
        assert graph.fallbacks == []
        code = [line for line in graph.source.splitlines() if not line.lstrip().startswith("#")]
        assert not any("torch.ops.tcport" in line for line in code)  # launched directly, not through the dispatcher


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prefill_of_mixed_lengths(dtype: torch.dtype) -> None:
    compiled = torch.compile(prefill, backend="tcport", fullgraph=True, dynamic=True)
    for lengths in ([5, 1, 33], [64, 2, 7, 9]):
        _, _, _, kc, vc, table, _, _ = batch(len(lengths), dtype)
        q = torch.randn(sum(lengths), HEADS, DIM, dtype=dtype, device="cuda")
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        lens = torch.tensor(lengths, device="cuda") + 20
        want, _ = reference.paged_attention((q * 0.5).cpu(), kc.cpu(), vc.cpu(), table.cpu(), lens.cpu(), cu.cpu())
        got = compiled(q, kc, vc, table, lens, cu)
        torch.testing.assert_close(got.cpu().float(), want, rtol=0, atol=TOLERANCE[dtype])
    report = tcport.last_report()
    assert report is not None
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and dtype != torch.float32
    kernel = "hopper_prefill" if on_hopper else "triton_prefill"
    assert [(n.kernel, n.tier) for n in report.nodes] == [(kernel, "tuned")]


def test_cuda_graphs_replay_with_new_data_in_place() -> None:
    args = batch(4, torch.float16)
    compiled = torch.compile(decode, backend="tcport", fullgraph=True)
    compiled(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(*args)
    for seed in range(3):
        torch.manual_seed(seed)
        for old, new in zip(args, batch(4, torch.float16), strict=True):
            old.copy_(new)
        want, k_cache = expected(args)
        graph.replay()
        torch.testing.assert_close(out.cpu().float(), want, rtol=0, atol=2e-2)
        assert torch.equal(args[3].cpu(), k_cache)


def test_strides_of_an_input_that_inductor_made_are_real() -> None:
    """The query comes out of fused code: without a constraint Inductor may lay it out otherwise than its fake says."""

    def fused(x: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        q = (x.transpose(0, 1) * 2).relu() + 1
        return tcport.paged_attention(q, kc, vc, table, lens)

    args = batch(3, torch.float32)
    x = torch.randn(HEADS, 3, DIM, device="cuda")
    want, _ = reference.paged_attention(((x.transpose(0, 1) * 2).relu() + 1).cpu(), *(a.cpu() for a in args[3:7]))
    got = torch.compile(fused, backend="tcport", fullgraph=True)(x, *args[3:7])
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("level", ["full", "attention"])
def test_the_torch_link_gives_the_same_on_the_gpu(level: str) -> None:
    args = batch(5, torch.float32)
    out, _ = expected(args)
    options = {"kernel": "torch_attention", "level": level}
    got = torch.compile(decode, backend="tcport", options=options)(*args)
    torch.testing.assert_close(got.cpu(), out, rtol=0, atol=1e-4)


def test_a_kernel_that_does_not_build_steps_down_with_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcport.kernels import triton_decode

    def broken(*args: object) -> None:
        raise KernelBuildError("ptxas fatal: injected.", "Nothing to do.")

    monkeypatch.setattr(triton_decode, "paged_decode", broken)
    args = batch(5, torch.float32)
    out, _ = expected(args)
    report = tcport.explain(decode, *args)
    assert report.nodes[-1].kernel == "triton_write+torch_attention"  # the write did not fail
    assert "ptxas fatal: injected" in report.graphs[0].fallbacks[0].message
    torch.testing.assert_close(tcport.paged_attention(args[0] * 0.5, *args[3:7]).cpu(), out, rtol=0, atol=1e-4)
