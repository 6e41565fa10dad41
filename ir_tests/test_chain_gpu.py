"""The fallback chain on a CUDA GPU: failures that the compiler, the loader and the driver really report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from subprocess_results import run_in_subprocess
from test_after_warm_up import WARM_UP, shifted
from torch import Tensor
from triton import knobs

import tcport
from tcport import chain, history, quarantine
from tcport._inductor import compile_count
from tcport.device import device_profile
from tcport.ir import TileConfig
from tcport.kernels import reference
from tcport.kernels.call import AttentionCall, Launcher
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import register_lowering, unregister_lowering
from tcport.probes import probe

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, PAGE = 8, 2, 16


@triton.jit
def never_compiles(x, BLOCK_M: tl.constexpr):
    tl.static_assert(BLOCK_M < 0, "injected")
    tl.store(x, 0.0)


@triton.jit
def too_much_shared(x, BLOCK_M: tl.constexpr):
    """A product over 512 columns at once: 256 KiB of shared memory on sm_90."""
    row, deep, column = tl.arange(0, 64), tl.arange(0, BLOCK_M), tl.arange(0, 64)
    a = tl.load(x + row[:, None] * BLOCK_M + deep[None, :])
    b = tl.load(x + deep[:, None] * 64 + column[None, :])
    tl.store(x + row[:, None] * 64 + column[None, :], tl.dot(a, b))


@triton.jit
def cannot_be_launched(x, BLOCK_M: tl.constexpr):
    if tl.program_id(1) < 0:
        tl.store(x, 0.0)


def refused(kernel: Any, block: int, grid: tuple[int, ...], num_warps: int = 4) -> Any:
    """A candidate that launches a kernel which fails, and would otherwise answer rightly."""

    def run(call: AttentionCall, launch: Launcher) -> Any:
        from tcport.kernels.triton_decode import paged_decode

        scratch = call.query.new_zeros(64 * 512, dtype=torch.float32)
        launch(kernel)[grid](x=scratch, BLOCK_M=block, num_warps=num_warps, num_stages=1)
        out, lse = paged_decode(call, TileConfig(16, 32, 4, 1), launch)
        return out + scratch[0].to(out.dtype) * 0, lse  # the scratch is used, so that no compiler drops the launch

    return run


FAULTS = {
    "build": refused(never_compiles, 16, (1,)),
    "resources": refused(too_much_shared, 512, (1,), 16),
    "launch": refused(cannot_be_launched, 16, (1, 70_000)),  # a grid has at most 65535 rows
}


@pytest.fixture(autouse=True)
def _no_failure_remembered() -> Iterator[None]:
    quarantine.clear()
    yield
    quarantine.clear()
    unregister_lowering("paged_attention", "broken")


def install(cause: str) -> None:
    register_lowering("paged_attention", name="broken", vendor="nvidia", priority=9)(
        lambda spec, profile: Candidate("broken", "tuned", FAULTS[cause])
    )


def decode(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lens: Tensor, slots: Tensor
) -> Tensor:
    tcport.kv_write(k, v, kc, vc, slots)
    return tcport.paged_attention(q, kc, vc, table, lens)


def batch(size: int = 4, dim: int = 64) -> list[Tensor]:
    table = torch.randperm(9 * size).reshape(size, 9).int()
    lens = torch.randint(1, 9 * PAGE + 1, (size,)).int()
    last = lens.long() - 1
    slots = table.long().gather(1, (last // PAGE)[:, None]).squeeze(1) * PAGE + last % PAGE
    shapes = (size, HEADS, dim), (size, KV_HEADS, dim), (size, KV_HEADS, dim), *[(9 * size, PAGE, KV_HEADS, dim)] * 2
    return [*(torch.randn(s).half().cuda() for s in shapes), table.cuda(), lens.cuda(), slots.cuda()]


def check(run: Any, args: list[Tensor]) -> None:
    q, k, v, kc, vc, table, lens, slots = (a.cpu() for a in args)
    reference.kv_write(k, v, kc, vc, slots)
    want, _ = reference.paged_attention(q, kc, vc, table, lens)
    torch.testing.assert_close(run(*args).cpu().float(), want.float(), rtol=0, atol=2e-2)
    assert torch.equal(args[3].cpu(), kc)


@pytest.mark.parametrize("cause", FAULTS)
def test_eager(cause: str) -> None:
    install(cause)
    before = len(history.fallbacks())
    for _ in range(3):
        check(decode, batch())
    steps = history.fallbacks()[before:]
    assert [(s.kernel, s.cause) for s in steps] == [("broken [tuned]", cause)]
    assert steps[0].to.startswith("triton_decode [tuned]")


@pytest.mark.parametrize("cause", FAULTS)
def test_compiled(cause: str) -> None:
    """Two layers: the kernel is called for the one of them that it was made for, and that one alone steps down."""

    def two(*args: Tensor) -> Tensor:
        return decode(*args[:8]) + decode(*args[8:]).sum()

    install(cause)
    register_lowering("paged_attention", name="broken", vendor="nvidia", priority=9)(
        lambda spec, profile: Candidate("broken", "tuned", FAULTS[cause]) if spec.head_dim_qk == 64 else []
    )
    compiled = torch.compile(decode, backend="tcport", fullgraph=True, options={"force_disable_caches": True})
    for _ in range(2):
        check(compiled, batch())
    report = tcport.last_report()
    assert report is not None
    assert [(f.kernel, f.cause) for f in report.graphs[0].fallbacks] == [("broken [tuned]", cause)]
    assert [n.kernel for n in report.nodes] == ["triton_write+triton_decode"]
    torch.compiler.reset()
    out = torch.compile(two, backend="tcport", fullgraph=True)(*batch(), *batch(dim=128))
    assert torch.isfinite(out).all()
    assert [n.kernel for n in tcport.last_report().nodes] == ["triton_write+triton_decode"] * 2  # type: ignore[union-attr]


def test_attention_alone_on_triton_with_the_write_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write's self-test gave wrong numbers: the pair goes on with another write, and attention stays on Triton."""
    wrong = "triton_write: ValueError: wrong numbers: injected"
    monkeypatch.setattr(chain, "trusted", lambda kernel, profile, tile: wrong if kernel == "triton_write" else None)
    compiled = torch.compile(decode, backend="tcport", fullgraph=True, options={"force_disable_caches": True})
    for size in (4, 7):
        check(compiled, batch(size))
    assert [n.kernel for n in tcport.last_report().nodes] == ["torch_write+triton_decode"]  # type: ignore[union-attr]
    assert tcport.last_report().clones == []  # type: ignore[union-attr]
    last = history.fallbacks()[-1]
    assert (last.to, last.cause) == ("torch_write [torch]", "wrong numbers")
    assert last.kernel.startswith("triton_write [tuned] ")
    check(decode, batch())


def test_inductor_times_the_tiles_and_takes_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Autotuning on the device: the winner is one of the chain, and gives the right result."""
    compiled = torch.compile(decode, backend="tcport", fullgraph=True, mode="max-autotune-no-cudagraphs")
    for size in (4, 7):
        check(compiled, batch(size))
    node = tcport.last_report().nodes[0]  # type: ignore[union-attr]
    assert node.kernel == "triton_write+triton_decode"
    assert "that Inductor timed" in node.why
    assert "AUTOTUNE tcport_write_and_attend" in capfd.readouterr().err
    asked = {"kernel": ["triton_decode", "torch_attention"], "force_disable_caches": True}
    check(torch.compile(decode, backend="tcport", fullgraph=True, options=asked), batch())
    node = tcport.last_report().nodes[0]  # type: ignore[union-attr]
    assert node.kernel.endswith(("+triton_decode", "+torch_attention"))
    print(node.kernel, node.tile, node.why)


def test_nothing_is_compiled_after_the_warm_up() -> None:
    """Case A20: batch sizes, lengths, table widths and misaligned tables after a warm-up."""
    built: list[object] = []
    compiled = torch.compile(decode, backend="tcport", fullgraph=True)
    for size, width, shift in WARM_UP:
        check(compiled, sized(size, width, 1, shift))
    graphs = compile_count()
    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **kw: built.append(kw)
    try:
        for size in (1, 2, 3, 7, 15, 16, 17, 33, 64):
            for length in (1, 15, 16, 17, 1000, 4096):
                pages = -(-length // PAGE)
                for width, shift in ((pages, 0), (pages + 1, 1), (256, 0)):
                    check(compiled, sized(size, width, length, shift))
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compile_count() == graphs
    assert built == []


def test_eager_calls_compile_a_fixed_set_of_kernels() -> None:
    """Case A20 outside compiled code; a head dim that no other test has, so that nothing is compiled before."""
    built: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **kw: built.append(kw["fn"].name.rpartition(".")[2])
    try:
        for size, width in ((1, 1), (17, 1), (1, 256), (2, 256)):
            check(decode, sized(size, width, 1, 0, dim=72))
        warm = list(built)
        for size in range(1, 65, 3):
            for length in (1, 16, 17, 1000, 4096):
                check(decode, sized(size, -(-length // PAGE), length, 0, dim=72))
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert sorted(warm) == [*["combine_kernel"] * 2, "kv_write_kernel", *["paged_attention_kernel"] * 4]
    assert built == warm


def sized(size: int, width: int, length: int, shift: int, dim: int = 64) -> list[Tensor]:
    """A batch of one length, its table and lengths ``shift`` elements into their storage."""
    args = batch(size, dim)
    table = torch.randint(9 * size, (size, width)).int()
    # Sequences share no page that they write to.
    table[:, (length - 1) // PAGE] = torch.arange(size)
    slots = table[:, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE
    lens = torch.full((size,), length).int()
    return [*args[:5], shifted(table.cuda(), shift), shifted(lens.cuda(), shift), slots.cuda()]


def test_a_layer_compiles_the_kernels_it_needs_and_no_others() -> None:
    report = tcport.explain(decode, *batch())
    assert report.graphs[0].source.count("async_compile.triton(") == 2 + ("combine_kernel" in report.graphs[0].source)


def test_the_probes_measure_this_device() -> None:
    outcomes = probe(device_profile("cuda"))
    for name, outcome in outcomes.items():
        print(name, outcome)
    for name, outcome in outcomes.items():
        assert outcome.ok or not name.startswith("triton_"), (name, outcome)
    for name in ("triton_write", "triton_merge", "fp16_dot", "bf16_dot", "int8_dot"):
        assert outcomes[name].ok, (name, outcomes[name])
    assert re.fullmatch(r"right, \S+/s in fp16, \S+/s in fp32", outcomes["fp16_atomics"].detail)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    assert outcomes["cooperative_launch"].detail == f"{programs} programs met"
    if torch.cuda.get_device_capability() >= (9, 0):
        assert outcomes["fp8_e4m3_dot"].ok, outcomes["fp8_e4m3_dot"]
        assert outcomes["async_copy"].ok, outcomes["async_copy"]


def test_without_a_c_compiler_the_service_runs() -> None:
    outcome = run_in_subprocess("gpu_toolchain_checks", "no compiler", PATH=os.path.dirname(__file__))
    assert outcome == {"no compiler": ""}


def test_without_an_assembler_the_service_runs() -> None:
    outcome = run_in_subprocess("gpu_toolchain_checks", "no assembler", TORCHINDUCTOR_COMPILE_THREADS="1")
    assert outcome == {"no assembler": ""}


def test_a_bundle_needs_no_compiler() -> None:
    """Kernels from a bundle, in a process where Triton can compile nothing: counted, and right."""
    outcome = run_in_subprocess("gpu_toolchain_checks", "bundle")
    assert outcome == {"bundle": ""}
