"""A write and an attention that became one node: either half fails, and is left, by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fault_injection import TILES, Faulty, FaultyWrite, installed, installed_write, raising
from test_chain_compiled import expected, new_tokens, serve, state

import tcport
from tcport import chain, quarantine
from tcport.device import device_profile
from tcport.errors import KernelBuildError
from tcport.lowering.operators import WRITE_AND_ATTEND, NodeChoice
from tcport.report import FallbackReason, GraphReport

REFUSED = KernelBuildError("ptxas fatal: injected.", "None.")
FRESH = {"force_disable_caches": True}


@pytest.fixture(autouse=True)
def _no_failure_remembered() -> Iterator[None]:
    quarantine.clear()
    yield
    quarantine.clear()


def refuse() -> None:
    raise REFUSED


def compiled_once() -> GraphReport:
    """The report of a step of serving, whose result is right."""
    torch.compiler.reset()
    args = [*new_tokens(), *state()]
    want = expected(args)
    out = torch.compile(serve, backend="tcport", fullgraph=True, options=FRESH)(*args)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    report = tcport.last_report()
    assert report is not None
    return report.graphs[0]


def steps(report: GraphReport) -> list[tuple[str, str, str]]:
    return [(f.kernel, f.to, f.cause) for f in report.fallbacks]


def test_an_attention_that_fails_is_named_and_leaves_the_write_where_it_was() -> None:
    with installed(Faulty(raising(REFUSED, TILES[:1]))) as kernel, installed_write(FaultyWrite(lambda: None)) as write:
        report = compiled_once()
        assert [n.kernel for n in report.nodes] == ["faulty_write+faulty"]
        assert steps(report) == [("faulty [tuned] 64x64 w4 st3", "faulty [tuned] 32x32 w4 st2", "build")]
        assert kernel.calls.count(TILES[0]) == 1
        # It is the kernel that is quarantined, not the pair: attention alone does not try it either.
        q, k, v, kc, vc, table, lens = [*new_tokens(), *state()]
        tcport.paged_attention(q, kc, vc, table, lens)
        assert kernel.calls.count(TILES[0]) == 1
        assert kernel.calls[-1] == TILES[1]
        tcport.kv_write(k, v, kc, vc, lens)
        assert write.calls > 0


def test_a_write_that_fails_is_named_and_leaves_the_attention_where_it_was() -> None:
    with installed(Faulty(lambda tile: None)) as kernel, installed_write(FaultyWrite(refuse)) as write:
        report = compiled_once()
        assert [n.kernel for n in report.nodes] == ["cpp_write+faulty"]
        assert steps(report) == [("faulty_write [tuned]", "cpp_write [tuned]", "build")]
        assert set(kernel.calls) == {TILES[0]}
        assert write.calls == 1
        assert compiled_once().fallbacks == []
        assert write.calls == 1
        _, k, v, kc, vc, _, lens = [*new_tokens(), *state()]
        tcport.kv_write(k, v, kc, vc, lens)
        assert write.calls == 1


def test_when_both_halves_fail_what_is_left_is_plain() -> None:
    with installed(Faulty(raising(REFUSED))), installed_write(FaultyWrite(refuse)):
        report = compiled_once()
        assert [n.kernel for n in report.nodes] == ["cpp_write+torch_attention"]
        assert [f.kernel.split()[0] for f in report.fallbacks] == ["faulty_write", *["faulty"] * 3]
        left = [r for r in report.nodes[0].rejected if "ptxas fatal: injected" in r.reason]
        assert [(r.kernel, r.tile) for r in left] == [("faulty_write", ""), *(("faulty", str(tile)) for tile in TILES)]


@pytest.mark.parametrize(
    ("wrong", "kernels", "left"),
    [
        ("faulty_write", "cpp_write+faulty", [("faulty_write [tuned]", "cpp_write [tuned]")]),
        (
            "faulty",
            "faulty_write+torch_attention",
            [(f"faulty [{tier}]", "") for tier in ("tuned", "tuned", "generic")],
        ),
    ],
)
def test_a_half_whose_self_test_is_wrong_is_left_alone(
    wrong: str, kernels: str, left: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        chain, "trusted", lambda kernel, profile, tile: "wrong numbers: off by 3" if kernel == wrong else None
    )
    before = len(tcport.history.fallbacks())
    with installed(Faulty(lambda tile: None)) as kernel, installed_write(FaultyWrite(lambda: None)) as write:
        report = compiled_once()
        assert [n.kernel for n in report.nodes] == [kernels]
        quarantine.clear()
        strict = torch.compile(serve, backend="tcport", options={"strict": True})
        with pytest.raises(KernelBuildError, match="off by 3.*Drop the option 'strict'"):
            strict(*new_tokens(), *state())
    reasons = tcport.history.fallbacks()[before:]
    assert {r.cause for r in reasons} == {"wrong numbers"}
    assert len(reasons) == len(left)
    for reason, (failed, to) in zip(reasons, left, strict=True):
        assert reason.kernel.startswith(failed)
        assert reason.to.startswith(to)
    assert (write.calls if wrong == "faulty_write" else len(kernel.calls)) == 0


def test_without_a_compiler_both_halves_are_left_at_once() -> None:
    missing = RuntimeError("Cannot find ptxas")
    with installed(Faulty(raising(missing))), installed_write(FaultyWrite(lambda: None)) as write:
        report = compiled_once()
        assert [n.kernel for n in report.nodes] == ["cpp_write+torch_attention"]
        assert steps(report) == [("faulty [tuned] 64x64 w4 st3", "cpp_write+torch_attention [torch]", "toolchain")]
        done = write.calls
        _, k, v, kc, vc, _, lens = [*new_tokens(), *state()]
        tcport.kv_write(k, v, kc, vc, lens)
        assert write.calls == done


def test_a_quarantined_half_takes_its_pairs_out_of_the_chain_and_no_others() -> None:
    with installed(Faulty(lambda tile: None)), installed_write(FaultyWrite(lambda: None)):
        spec, profile = WRITE_AND_ATTEND.spec(WRITE_AND_ATTEND.call(*_arguments())), device_profile("cpu")
        choice = NodeChoice(WRITE_AND_ATTEND, spec, WRITE_AND_ATTEND.select(spec, profile, None), profile)
        assert [p.kernel for p in chain.survivors(choice)][:2] == ["faulty_write+faulty", "cpp_write+faulty"]
        first = choice.selection.candidates[0]
        reason = FallbackReason("node", "faulty_write [tuned]", "", "launch", "RuntimeError", "")
        quarantine.add(quarantine.keys_of(choice, first)[first.kernels[0]], reason)
        assert [p.kernel for p in chain.survivors(choice)][:2] == ["cpp_write+faulty", "torch_write+faulty"]
        assert len(chain.survivors(choice)) == 2 * (len(TILES) + 1)
        assert [k.kernel for k in quarantine.reasons(choice)] == ["faulty_write"]


def _arguments() -> list[torch.Tensor]:
    q, k, v, kc, vc, table, lens = [*new_tokens(), *state()]
    return [q, k, v, kc, vc, lens - 1, table, lens]
