"""Probes: run once for a device, bounded in time, kept; wrong numbers take a kernel out of the chain."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fault_injection import Faulty, installed
from subprocess_results import run_in_subprocess

import tcport
from tcport import chain, history, quarantine
from tcport.device import catalogue_profile
from tcport.errors import KernelBuildError
from tcport.ir import TileConfig
from tcport.kernels import reference
from tcport.lowering import registry
from tcport.lowering.operators import PAGED_ATTENTION
from tcport.lowering.registry import Row
from tcport.probes import CAPABILITIES, FAMILIES, Outcome, probe, results, trusted
from tcport.user_cache import cache_folder

H200 = catalogue_profile("h200")
RIGHT, WRONG = Outcome(True, "right"), Outcome(False, "ValueError: wrong numbers: off by 3, allowed 0.02")


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TCPORT_CACHE_DIR", str(tmp_path / "cache"))
    results.forget()
    quarantine.clear()
    yield
    results.forget()
    quarantine.clear()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A present H200 whose prefill kernel is wrong, and whose decode kernel is with a large tile.

    The list grows by the group with every run of probes.
    """
    ran: list[str] = []
    crash = Outcome(False, "RuntimeError: an illegal memory access was encountered")
    outcomes = {
        CAPABILITIES: {"fp16_dot": RIGHT},
        "triton_decode": {"triton_decode 16x64 w4 st2": RIGHT, "triton_decode 64x64 w4 st2": WRONG},
        "triton_prefill": {"triton_prefill 16x64 w4 st2": WRONG},
        "triton_write": {"triton_write": crash},
    }

    def run(index: int, group: str, time_limit: float = 0) -> tuple[dict[str, Outcome], str]:
        ran.append(group)
        return outcomes.get(group, {}), ""

    monkeypatch.setattr(results, "_present", lambda profile: 0)
    monkeypatch.setattr(results, "run_probes", run)
    return ran


def test_probes_run_once_for_a_device_driver_and_compiler(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(H200, ["triton_decode"])["triton_decode 16x64 w4 st2"] == RIGHT
    probe(H200, ["triton_decode"])
    assert runs == ["triton_decode"]
    results.forget()  # as in another process
    assert probe(H200, ["triton_decode"])["triton_decode 64x64 w4 st2"] == WRONG
    assert runs == ["triton_decode"]
    probe(H200.replace(driver_version="999"), ["triton_decode"])
    assert runs == ["triton_decode"] * 2
    results.forget()
    monkeypatch.setattr(results, "triton_version", lambda: "99")
    probe(H200, ["triton_decode"])
    assert runs == ["triton_decode"] * 3


def test_only_what_is_asked_for_is_probed(runs: list[str]) -> None:
    """A decode step with its write waits for the tests of these two kernels, not of prompts and not of fp8 products."""
    assert trusted("a third party's", H200) is None
    assert runs == []
    assert set(probe(H200, ["triton_decode", "triton_write", "a third party's"])) == {
        "triton_decode 16x64 w4 st2",
        "triton_decode 64x64 w4 st2",
        "triton_write",
    }
    assert sorted(runs) == ["triton_decode", "triton_write"]
    runs.clear()
    assert {"fp16_dot", "triton_prefill 16x64 w4 st2", "triton_write"} < set(probe(H200))
    assert sorted(runs) == sorted({CAPABILITIES, *FAMILIES} - {"triton_decode", "triton_write"})


def test_threads_that_ask_together_probe_once(runs: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: probe(H200, ["triton_decode"]), range(8)))
    assert runs == ["triton_decode"]
    assert all(answer == answers[0] and len(answer) == 2 for answer in answers)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        "3",
        "{",
        '{"triton_decode 16x64 w4 st2": 3}',
        '{"a": {"fine": true}}',
        '{"a": {"ok": false, "detail": 3}}',
        '{"a": {"ok": "no", "detail": "wrong numbers"}}',
    ],
)
def test_a_damaged_file_of_outcomes_is_probed_again(damaged: str, runs: list[str]) -> None:
    right = probe(H200, ["triton_decode"])
    (path,) = cache_folder("probes").iterdir()
    path.write_text(damaged)
    results.forget()  # as in another process
    assert probe(H200, ["triton_decode"]) == right
    assert runs == ["triton_decode"] * 2
    assert json.loads(path.read_text()).keys() == right.keys()


def test_only_wrong_numbers_cost_the_trust(runs: list[str]) -> None:
    assert trusted("triton_write", H200) is None  # its test could not be run
    assert trusted("a third party's", H200) is None
    assert WRONG.detail in str(trusted("triton_prefill", H200, TileConfig(16, 16, 1, 1)))


def test_a_large_tile_that_is_wrong_costs_the_tiles_that_hold_it(runs: list[str]) -> None:
    for sound in (TileConfig(16, 64, 4, 2), TileConfig(32, 64, 8, 1), TileConfig(128, 32, 4, 1)):
        assert trusted("triton_decode", H200, sound) is None
    for unsound in (TileConfig(64, 64, 4, 2), TileConfig(64, 64, 8, 1), TileConfig(128, 128, 4, 1)):
        assert "triton_decode 64x64 w4 st2" in str(trusted("triton_decode", H200, unsound))


def test_what_was_measured_goes_before_what_is_said(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's flags: a probe that failed refuses a device whose data sheet has the capability, and the other way."""
    row = Row("paged_attention", "mine", lambda spec, profile: [], None, None, ("fp8_e4m3_dot",), 0)
    measured = {"fp8_e4m3_dot": Outcome(False, "absent")}
    monkeypatch.setattr(registry, "probe", lambda profile, groups: measured)
    said = H200.replace(flags={"fp8_e4m3_dot": True})
    assert row.fits(said).reason == "the device lacks fp8_e4m3_dot"
    measured["fp8_e4m3_dot"] = RIGHT
    assert row.fits(H200).ok
    measured.clear()
    assert row.fits(said).ok


def test_outcomes_of_a_run_that_was_cut_short_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"name": "fp16_dot", "ok": True, "detail": "right"})

    def cut(command: list[str], **kwargs: object) -> None:
        raise subprocess.TimeoutExpired(command, 1.0, output=f'{line}\n{{"name": "bf16'.encode())

    monkeypatch.setattr(results, "_present", lambda profile: 0)
    monkeypatch.setattr(subprocess, "run", cut)
    assert results.run_probes(0, CAPABILITIES, 1.0) == ({"fp16_dot": RIGHT}, "not done in 1 s")
    assert probe(H200, [CAPABILITIES]) == {"fp16_dot": RIGHT}
    assert not (cache_folder("probes")).exists()


def test_what_else_a_process_says_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers and drivers print too, in any bytes; the process may end by a signal, or not be had at all."""
    line = json.dumps({"name": "fp16_dot", "ok": True, "detail": "right"})
    said = '{block: 3}\n{\n3\n{}\n{"name": 3}\n{"name": "a", "ok": 1, "detail": 5}\n' + line
    program = f"import os; os.write(1, {said.encode()!r} + b'\\n\\xff\\n'); os.write(2, b'\\xff'); os.abort()"
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **given: real([command[0], "-c", program], **given))
    outcomes, trouble = results.run_probes(0, CAPABILITIES)
    assert outcomes == {"fp16_dot": RIGHT}
    assert trouble == "the process ended with code -6: \ufffd"
    for python in ("", None, "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", python)
        outcomes, trouble = results.run_probes(0, CAPABILITIES)
        assert outcomes == {}
        assert trouble.startswith("no process can be started: ")


def test_what_cannot_be_kept_is_known_to_the_process_and_leaves_nothing(runs: list[str]) -> None:
    """Something stands where the file of outcomes belongs."""
    probe(H200, ["triton_decode"])
    (path,) = cache_folder("probes").iterdir()
    path.unlink()
    path.mkdir()
    results.forget()
    for _ in range(2):
        assert probe(H200, ["triton_decode"])["triton_decode 16x64 w4 st2"] == RIGHT
    assert runs == ["triton_decode"] * 2
    assert list(cache_folder("probes").iterdir()) == [path]


def test_a_device_that_is_not_there_is_not_probed() -> None:
    assert probe(H200.replace(name="A device that nobody has")) == {}


def test_a_kernel_with_wrong_numbers_is_left_and_a_forced_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "trusted", lambda kernel, profile, tile: WRONG.detail if kernel == "faulty" else None)
    q, cache, table = torch.randn(2, 4, 16), torch.randn(8, 4, 2, 16), torch.arange(8).reshape(2, 4)
    args = (q, cache, cache.flip(0), table, torch.tensor([3, 9]))
    with installed(Faulty(lambda tile: None)) as kernel:
        out = tcport.paged_attention(*args)
        torch.testing.assert_close(out, reference.paged_attention(*args)[0], rtol=1e-5, atol=1e-5)
        assert kernel.calls == []
        last = history.fallbacks()[-1]
        assert (last.cause, last.error, last.to) == ("wrong numbers", "SelfTestError", "torch_attention [torch]")
        assert "off by 3" in last.message
        quarantine.clear()
        with pytest.raises(KernelBuildError, match="off by 3"):
            chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*args), kernel="faulty")


def test_the_self_tests_pass_right_kernels_and_catch_a_wrong_one() -> None:
    outcome = run_in_subprocess("self_test_checks", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert outcome == dict.fromkeys(("right", "wrong", "fp16 dot"), "")
