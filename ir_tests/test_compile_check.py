"""The compile check of a chain: what it takes first, what it says, and when it leaves a chain as it was ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_chain_compiled import new_tokens, serve, state
from test_tiling_rank import H200, decode_spec

import tcport
from tcport.device import DeviceProfile
from tcport.ir import AttentionSpec, TileConfig
from tcport.lowering import compile_check
from tcport.lowering.candidate import Selection
from tcport.lowering.paged_attention import every_tile
from tcport.lowering.registry import select
from tcport.testing.devices import lower_on
from tcport.tiling import fit, rank_tiles
from tcport.tiling.footprint import Compiled, Footprint

RANKED = rank_tiles(decode_spec(), H200).configs
Compiler = Callable[[Callable[[TileConfig], Compiled]], list[TileConfig]]


def takes(tile: TileConfig, shared: int = 20_000, spill: int = 0) -> Compiled:
    return Compiled((Footprint("paged_attention_kernel", shared, 96, spill, 32 * tile.num_warps),))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """A present H200 with a compiler of the test's own; the list grows by each tile that is compiled."""
    tried: list[TileConfig] = []

    def install(compiled: Callable[[TileConfig], Compiled]) -> list[TileConfig]:
        def stand_in(
            spec: AttentionSpec, tiles: list[TileConfig], profile: DeviceProfile, entry: object, cache: object
        ) -> list[Compiled]:
            tried.extend(tiles)
            return list(map(compiled, tiles))

        monkeypatch.setattr(fit, "measure", stand_in)
        return tried

    monkeypatch.setenv("TCPORT_COMPILE_CHECK", "1")
    monkeypatch.setattr(compile_check, "is_present", lambda profile: True)
    compile_check._checked.cache_clear()
    yield install
    compile_check._checked.cache_clear()


def chain() -> Selection:
    return select("paged_attention", decode_spec(), H200)


def tiles(selection: Selection) -> list[TileConfig]:
    return [link.config for link in selection.candidates if link.kernel == "triton_decode"]  # type: ignore[misc]


def test_the_first_tile_that_fits_goes_first_with_what_it_takes(compiler: Compiler) -> None:
    tried = compiler(takes)
    for _ in range(2):
        chosen = chain()
        assert tiles(chosen)[:3] == list(RANKED[:3])
        first, second = chosen.candidates[:2]
        assert first.footprint == "paged_attention_kernel: 20000 bytes shared, 96 registers x 32 threads"
        assert second.footprint == ""
    assert tried == [RANKED[0]]  # and nothing was compiled again


def test_a_tile_that_asks_for_too_much_is_no_link_and_the_reason_is_told(compiler: Compiler) -> None:
    compiler(lambda tile: takes(tile, 300_000 if tile == RANKED[0] else 20_000))
    chosen = chain()
    assert RANKED[0] not in tiles(chosen)
    reasons = {rejection.config: rejection.reason for rejection in chosen.rejections}
    assert reasons[RANKED[0]] == "paged_attention_kernel needs 300000 bytes of shared memory; the device has 232448"


def test_a_tile_that_spills_stands_behind_those_that_do_not(compiler: Compiler) -> None:
    compiler(lambda tile: takes(tile, spill=8 if tile == RANKED[0] else 0))
    chosen = chain()
    first, *rest = tiles(chosen)
    assert first != RANKED[0]
    assert rest[:2] == [tile for tile in RANKED[1:] if tile != first][:2]
    assert [(r.config, r.reason) for r in chosen.rejections if r.config] == [
        (RANKED[0], "8 bytes of a thread's registers spill")
    ]


def test_tuning_starts_from_what_the_chain_would_take(compiler: Compiler) -> None:
    compiler(lambda tile: takes(tile, spill=8 if tile == RANKED[0] else 0))
    candidates = every_tile(decode_spec(), H200)
    assert candidates[0].config == tiles(chain())[0] != RANKED[0]
    assert {link.config for link in candidates} == set(RANKED)


def test_where_nothing_fits_the_next_kernel_takes_the_call(compiler: Compiler) -> None:
    compiler(lambda tile: takes(tile, 300_000))
    chosen = chain()
    assert [link.kernel for link in chosen.candidates] == ["torch_attention"]
    assert "300000 bytes of shared memory" in {r.kernel: r.reason for r in chosen.rejections}["triton_decode"]


def test_a_broken_compiler_changes_nothing_and_is_said(compiler: Compiler) -> None:
    compiler(lambda tile: Compiled(error="FileNotFoundError: ptxas"))
    chosen = chain()
    assert tiles(chosen)[:3] == list(RANKED[:3])
    assert "not checked: No decode tile compiles" in chosen.candidates[0].footprint
    assert "FileNotFoundError: ptxas" in chosen.candidates[0].footprint


def test_a_device_that_is_not_there_and_a_check_turned_off_compile_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = compiler(takes)
    monkeypatch.setenv("TCPORT_COMPILE_CHECK", "0")
    assert tiles(chain())[:3] == list(RANKED[:3])
    monkeypatch.setenv("TCPORT_COMPILE_CHECK", "1")
    monkeypatch.setattr(compile_check, "is_present", lambda profile: False)
    assert tiles(chain())[:3] == list(RANKED[:3])
    assert tried == []


def test_the_report_shows_the_footprint_of_the_kernel_and_the_steps(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCPORT_COMPILE_CHECK", "0")
    first = lower_on(H200, serve, *new_tokens(), *state())[0].tile
    monkeypatch.setenv("TCPORT_COMPILE_CHECK", "1")
    compiler(lambda tile: takes(tile, spill=8 if str(tile) == first else 0))
    (node,) = lower_on(H200, serve, *new_tokens(), *state())
    assert node.kernel == "triton_write+triton_decode"
    assert node.footprint.startswith("paged_attention_kernel: 20000 bytes shared, 96 registers x ")
    assert (first, "8 bytes of a thread's registers spill") in [(r.tile, r.reason) for r in node.rejected]
    report = tcport.report.CompileReport([tcport.report.GraphReport(nodes=[node])])
    assert f"\n      compiled: {node.footprint}" in str(report)
    assert f"not triton_decode {first}: 8 bytes of a thread's registers spill" in str(report)


def test_the_real_compiler_s_word(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, as ``plan`` compiles: two buffers of 32 keys, K and V of 256 in 16 bits, and 16 query rows."""
    monkeypatch.undo()
    monkeypatch.setenv("TCPORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_check, "is_present", lambda profile: True)
    monkeypatch.delenv("TCPORT_COMPILE_CHECK", raising=False)
    first = select("paged_attention", decode_spec(dim_qk=256, dim_v=256), H200).candidates[0]
    assert str(first) == "triton_decode [tuned] 16x32 w2 st3 parts 2"
    name, _, rest = first.footprint.partition(": ")
    assert name == "paged_attention_kernel"
    assert 73728 <= int(rest.split(" ")[0]) < 73728 + 2048


@pytest.mark.gpu
def test_on_the_gpu_the_footprint_is_that_of_the_device_s_own_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCPORT_COMPILE_CHECK", "1")
    shapes = (2, 8, 72), *[(64, 16, 2, 72)] * 2
    args = [torch.randn(shape, device="cuda").half() for shape in shapes]
    table = torch.arange(64, device="cuda").int().view(2, 32)
    lens = torch.tensor([5, 512], device="cuda").int()
    report = tcport.explain(tcport.paged_attention, *args, table, lens)
    (node,) = report.nodes
    print(report)
    assert node.kernel == "triton_decode"
    assert "paged_attention_kernel: " in node.footprint
    assert "compiled: paged_attention_kernel: " in str(report)
