"""A bundle as a link of the chain: what is wrong with it is found before a launch, recorded, and not tried again."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bundle import H200, built, copy, edit  # noqa: F401  (fixtures)
from test_bundle_drivers import FakeDriver, stream  # noqa: F401  (fixture)
from torch import Tensor

import tcport
from tcport import chain, history, quarantine
from tcport.bundle import cuda_driver, launch, read_bundle
from tcport.bundle.manifest import Bundle
from tcport.errors import BundleError, KernelBuildError, NoCandidateError
from tcport.failures import cause_of
from tcport.kernels import reference
from tcport.lowering import bundled
from tcport.lowering.operators import PAGED_ATTENTION, WRITE_AND_ATTEND, choose, choose_for
from tcport.lowering.registry import touch
from tcport.lowering.spec import attention_spec, kind_of


@pytest.fixture(autouse=True)
def folder(copy: Path, stream: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: F811
    """A bundle in use on an H200, as far as facts go: tensors lie on the CPU, and the driver is a fake."""
    monkeypatch.setenv("TCPORT_BUNDLE", str(copy))
    monkeypatch.setattr(chain, "device_profile", lambda device: H200)
    launch._functions.clear()
    quarantine.clear()
    touch()
    yield copy
    quarantine.clear()
    launch._functions.clear()
    touch()


def problem() -> tuple[Tensor, ...]:
    k_cache, v_cache = (torch.randn(8, 16, 2, 16).half() for _ in range(2))
    table = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    return torch.randn(2, 4, 16).half(), k_cache, v_cache, table, torch.tensor([3, 61], dtype=torch.int32)


def attended_right(args: tuple[Tensor, ...]) -> None:
    want, _ = reference.paged_attention(*args)
    torch.testing.assert_close(tcport.paged_attention(*args).float(), want.float(), rtol=0, atol=2e-3)


def break_triton(args: tuple[Tensor, ...]) -> None:
    choice = choose_for(PAGED_ATTENTION, kind_of(attention_spec(PAGED_ATTENTION.call(*args))), H200)
    first = choice.selection.candidates[0]
    chain.step_down(choice, first, first, RuntimeError("Cannot find ptxas"), "toolchain")
    assert chain.survivors(choice)[0].kernel == "bundle_attention"


def flip_a_byte(folder: Path) -> None:
    for entry in read_bundle(folder).entries:
        data = bytearray((folder / entry.file).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / entry.file).write_bytes(data)


FAULTS = {
    "a flipped byte": ("unavailable", "corrupt", ""),
    "no cuda-python": ("unavailable", "cuda", ""),
    "a binary the driver refuses": ("unavailable", "cuLibraryLoadData of .* failed: REFUSED", "cuLibraryLoadData"),
    "a launch the driver refuses": ("launch", "cuLaunchKernel .*failed: REFUSED", "cuLaunchKernel"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_blob_that_cannot_be_used_is_left_once(
    fault: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cause, said, refusing = FAULTS[fault]
    driver = FakeDriver(refusing)
    if fault == "no cuda-python":
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    else:
        monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    if fault == "a flipped byte":
        flip_a_byte(folder)
    args = problem()
    break_triton(args)
    before, asked = len(history.fallbacks()), counted(monkeypatch)
    for _ in range(3):
        attended_right(args)
    (step,) = history.fallbacks()[before:]
    assert (step.cause, step.to) == (cause, "torch_attention [torch]")
    assert step.kernel.startswith("bundle_attention [blob]")
    assert re.search(said, step.message)
    assert len(asked) == 1
    assert ("cuLaunchKernel" in driver.calls) == (fault == "a launch the driver refuses")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every binary that is read."""
    read: list[Any] = []
    binary = Bundle.binary
    monkeypatch.setattr(Bundle, "binary", lambda self, entry: read.append(entry) or binary(self, entry))
    return read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"abi": 99}, "launch convention 99"),
        ({"sources": "0" * 64}, "other kernel sources"),
        ({"target": ["cuda", 80, 32]}, "was built for cuda 80, the device is cuda 90"),
    ],
)
def test_a_bundle_for_something_else_is_no_link_and_the_reason_is_told(
    change: dict[str, Any],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edit(folder, lambda manifest: manifest.update(change))
    monkeypatch.setenv("TCPORT_BUNDLE", f"{folder}/")  # another spelling: folders are read once
    read = counted(monkeypatch)
    selection = choose(PAGED_ATTENTION, PAGED_ATTENTION.call(*problem()), H200).selection
    assert "bundle_attention" not in {c.kernel for c in selection.candidates}
    assert said in {r.kernel: r.reason for r in selection.rejections}["bundle_attention"]
    with pytest.raises(NoCandidateError, match=said):
        chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*problem()), kernel="bundle_attention")
    assert read == []


def test_the_environment_may_name_another_bundle_at_any_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    call = PAGED_ATTENTION.call(*problem())
    chain.run(PAGED_ATTENTION, call, kernel="bundle_attention")
    monkeypatch.delenv("TCPORT_BUNDLE")
    with pytest.raises(NoCandidateError, match="no bundle is loaded"):
        chain.run(PAGED_ATTENTION, call, kernel="bundle_attention")
    monkeypatch.setenv("TCPORT_BUNDLE", str(folder))
    chain.run(PAGED_ATTENTION, call, kernel="bundle_attention")


def test_a_graph_s_operator_runs_the_tile_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bundle with several tiles: a tile that failed is not run again in the name of the next one."""
    monkeypatch.setattr(bundled, "device_profile", lambda device: H200)
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    args = problem()
    links = choose(PAGED_ATTENTION, PAGED_ATTENTION.call(*args), H200).selection.candidates
    tiles = [str(link.uncut.config) for link in links if link.kernel == "bundle_attention"]
    assert len(tiles) == len(set(tiles)) >= 1
    chosen: list[str] = []
    select = bundled.select

    def spied(*given: Any, **named: Any) -> Any:
        selection = select(*given, **named)

        def run(link: Any) -> Any:
            return lambda call, launch: chosen.append(str(link.uncut.config)) or link.run(call, launch)

        links = tuple(dataclasses.replace(link, run=run(link)) for link in selection.candidates)
        return dataclasses.replace(selection, candidates=links)

    monkeypatch.setattr(bundled, "select", spied)
    touch()
    for tile in tiles:
        torch.ops.tcport.bundle_attention(*args, tile=tile)
    assert chosen == tiles
    with pytest.raises(BundleError, match="No bundle in use holds bundle_attention 8x8 w1 st1"):
        torch.ops.tcport.bundle_attention(*args, tile="8x8 w1 st1")
    monkeypatch.delenv("TCPORT_BUNDLE")
    with pytest.raises(BundleError, match="no bundle is loaded") as caught:
        torch.ops.tcport.bundle_attention(*args, tile=tiles[0])
    assert cause_of(caught.value) == "unavailable"  # a graph steps down


def test_a_forced_blob_that_is_corrupt_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    flip_a_byte(folder)
    with pytest.raises(KernelBuildError, match="No kernel is left .* corrupt"):
        chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*problem()), kernel="bundle_attention")
    assert driver.calls == {}


def test_a_precompiled_attention_has_a_write_that_needs_no_compiler_first() -> None:
    q, k_cache, v_cache, table, lens = problem()
    new = (torch.randn(2, 2, 16).half() for _ in range(2))
    call = WRITE_AND_ATTEND.call(q, *new, k_cache, v_cache, lens.long(), table, lens)
    pairs = [c.kernel for c in choose(WRITE_AND_ATTEND, call, H200).selection.candidates]
    writes = [pair.partition("+")[0] for pair in pairs if pair.endswith("+bundle_attention")]
    assert writes == ["bundle_write", "torch_write", "triton_write"]
    assert next(pair for pair in pairs if pair.endswith("+triton_decode")) == "triton_write+triton_decode"


def test_a_sound_blob_is_launched_with_the_call_s_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    args = problem()
    loads = tcport.counters().get("bundle kernels loaded", 0)
    chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*args), kernel="bundle_attention", strict=True)
    chain.run(PAGED_ATTENTION, PAGED_ATTENTION.call(*args), kernel="bundle_attention", strict=True)
    numbers, _ = driver.calls["cuLaunchKernel"][0][9]
    assert args[0].data_ptr() in numbers
    assert args[1].data_ptr() in numbers
    assert tcport.counters()["bundle kernels loaded"] - loads in (1, 2)  # the kernel, and what merges its splits


def test_kernels_behind_a_precompiled_one_are_tested_when_it_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A self-test compiles: where kernels were compiled ahead it would be the first thing that does."""
    asked: list[str] = []
    monkeypatch.setattr(chain, "trusted", lambda kernel, profile, tile: asked.append(kernel))
    q, k_cache, v_cache, table, lens = problem()
    new = (torch.randn(2, 2, 16).half() for _ in range(2))
    call = WRITE_AND_ATTEND.call(q, *new, k_cache, v_cache, lens.long(), table, lens)
    choice = choose(WRITE_AND_ATTEND, call, H200, "bundle_attention")
    chain.screened(choice)
    assert asked == []
    first = choice.selection.candidates[0]
    chain.step_down(choice, first, first.kernels[0], BundleError("The bundle is gone.", "None."), "unavailable")
    assert chain.survivors(chain.screened(choice))[0].kernel == "torch_write+bundle_attention"
    assert asked == []
    chain.screened(choice, every=True)
    assert set(asked) == {"triton_write"}
    asked.clear()
    chain.screened(choose(WRITE_AND_ATTEND, call, H200))
    assert set(asked) == {"triton_write", "triton_decode"}
