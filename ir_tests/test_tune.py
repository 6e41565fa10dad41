"""Measured tuning: what is promoted, how it is kept and shared, and what the chain makes of it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
import tune_checks
from subprocess_results import run_in_subprocess
from test_tiling_rank import H200, decode_spec
from typer.testing import CliRunner

import tcport
from tcport import chain
from tcport.bench.cases import parse_case
from tcport.bench.inputs import copies_of
from tcport.bench.tune import shapes, tune
from tcport.cli import app
from tcport.device import nvidia_source, refresh
from tcport.errors import ArgumentError
from tcport.ir import BATCH, CONTEXT, AttentionSpec
from tcport.kernels.call import AttentionCall, Launcher
from tcport.kernels.offline import record
from tcport.lowering.operators import PAGED_ATTENTION
from tcport.lowering.registry import rows, select, touch
from tcport.testing.devices import lower_on
from tcport.tiling import rank_tiles, tuned
from tcport.tiling.tuned import Measured, Table, facts_of, identity_of, measured, store, stored, table_from, tile_of

OPEN = dataclasses.replace(decode_spec(), num_seqs=BATCH, num_tokens=BATCH, max_context=CONTEXT)
SLOWER = rank_tiles(OPEN, H200).configs[5]
"""A tile that the model would not try."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TCPORT_CACHE_DIR", str(tmp_path))
    return tmp_path / "tuned"


def entry(spec: AttentionSpec = OPEN) -> Measured:
    return Measured(facts_of(spec), tile_of(SLOWER), "16x32 w1 st3", 1.034, ("h32-8 d128 b1 c4096",))


def first(spec: AttentionSpec = OPEN, profile: tcport.device.DeviceProfile = H200) -> tuple[dict[str, int], str]:
    link = select("paged_attention", spec, profile).candidates[0]
    return tile_of(link.config), link.why


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_in_subprocess("tune_checks", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("name", tune_checks.checks())
def test_tuning(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == ""


def test_the_chain_takes_what_was_measured_and_says_why() -> None:
    model = first()
    assert model[0] == {"block_m": 16, "block_n": 32, "num_warps": 1, "num_stages": 3}
    store(Table(identity_of(H200), (entry(),)))
    tile, why = first()
    assert tile == tile_of(SLOWER)
    assert why == "measured 3.4% faster than the model's 16x32 w1 st3 (h32-8 d128 b1 c4096)"
    links = [link for link in select("paged_attention", OPEN, H200).candidates if link.tier == "tuned"]
    assert [tile_of(link.config) for link in links] == [
        tile_of(SLOWER),
        *map(tile_of, rank_tiles(OPEN, H200).configs[:2]),
    ]
    assert links[0].config.splits(1, 1, 4096) > 1  # type: ignore[union-attr]  # by its own formula


def test_it_is_for_calls_of_its_own_shape_whose_batch_is_open() -> None:
    store(Table(identity_of(H200), (entry(),)))
    assert first(dataclasses.replace(OPEN, return_lse=True))[0] == tile_of(SLOWER)
    for other in (
        decode_spec(),
        dataclasses.replace(OPEN, batch_invariant=True),
        dataclasses.replace(OPEN, window=True),
        dataclasses.replace(OPEN, kv_dtype="float16", query_dtype="float16"),
        dataclasses.replace(OPEN, k_layout=dataclasses.replace(OPEN.k_layout, page_size=32)),
    ):
        assert measured(other, H200) is None
        assert first(other)[1] == ""


@pytest.mark.parametrize("change", ["driver", "power limit", "compiler", "device", "kernels"])
def test_another_device_driver_power_limit_or_compiler_is_another_identity(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_source, "power_limit", lambda uuid: 700.0)
    profile = H200.replace(driver_version="580")
    store(Table(identity_of(profile), (entry(),)))
    assert measured(OPEN, profile.replace(uuid="another card of the kind")) is not None
    if change == "driver":
        profile = profile.replace(driver_version="590")
    elif change == "device":
        profile = profile.replace(compute_units=114)
    elif change == "power limit":
        monkeypatch.setattr(nvidia_source, "power_limit", lambda uuid: 350.0)
    elif change == "compiler":
        monkeypatch.setattr(tuned, "triton_version", lambda: "99")
    else:
        monkeypatch.setattr(tuned, "kernel_sources", lambda: "others")
    assert measured(OPEN, profile) is None


def test_a_file_that_is_no_table_is_left_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    path = store(Table(identity_of(H200), (entry(),)))
    for text in ("", '{"identity": {}, "entries": [{"tile": {}}]}', "[]"):
        path.write_text(text)
        path.touch()
        tuned._entries.cache_clear()
        with caplog.at_level(logging.WARNING, "tcport.chain"):
            assert first()[1] == ""
        assert "is no table of measured tiles" in caplog.records[-1].getMessage()
    with pytest.raises(ArgumentError, match="no table of measured tiles"):
        stored(identity_of(H200))


@pytest.mark.parametrize(
    "damage", [{"facts": "x"}, {"facts": [1]}, {"gain": "2"}, {"model": 3}, {"cases": [4]}, {"tile": 7}]
)
def test_an_entry_that_is_damaged_costs_the_table_and_no_kernel(
    damage: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    table = Table(identity_of(H200), (entry(),))
    path = store(table)
    data = table.to_dict()
    data["entries"][0].update(damage)
    path.write_text(json.dumps(data))
    tuned._entries.cache_clear()
    assert first()[1] == ""
    assert "is no table of measured tiles" in caplog.records[-1].getMessage()
    worded = dict.fromkeys(("block_m", "block_n", "num_warps", "num_stages"), "16")
    sized = data["entries"][0] | {"facts": {}, "tile": worded}
    with pytest.raises(ArgumentError, match="all of them whole numbers"):
        tuned.table_from({"identity": {}, "entries": [sized | {"cases": []}]}, "it")


def test_a_table_replaces_what_was_measured_again_and_keeps_the_rest() -> None:
    prefill = dataclasses.replace(OPEN, form="varlen")
    table = Table(identity_of(H200), (entry(), entry(prefill)))
    again = dataclasses.replace(entry(), gain=1.5)
    assert table.with_entries([again], [facts_of(OPEN)]).entries == (entry(prefill), again)
    assert table.with_entries([], [facts_of(OPEN)]).entries == (entry(prefill),)
    assert stored(identity_of(H200)) == Table(identity_of(H200))
    store(table)
    assert stored(identity_of(H200)) == table


def test_a_folder_that_cannot_be_written_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file in its place")
    with pytest.raises(ArgumentError, match="cannot be written"):
        store(Table(identity_of(H200), (entry(),)))


def test_compiled_code_has_another_key_once_something_was_measured() -> None:
    def key() -> str:
        return next(
            row.state_for({"nvidia"})
            for row in rows("paged_attention")
            if (row.name, row.arch) == ("triton_prefill", "sm_90*")
        )

    before = key()
    store(Table(identity_of(H200), (entry(),)))
    after = key()
    assert before != after == key()


def test_the_report_of_a_compile_says_what_was_measured() -> None:
    query = torch.randn(3, 32, 128).bfloat16()
    caches = [torch.randn(16, 16, 8, 128).bfloat16() for _ in range(2)]
    args = query, *caches, torch.arange(12).int().view(3, 4), torch.tensor([5, 33, 64])
    store(Table(identity_of(H200), (entry(),)))
    (node,) = lower_on(H200, tcport.paged_attention, *args, dynamic=True)
    assert node.tile.startswith(str(SLOWER.uncut))
    assert node.why.startswith("measured 3.4% faster than the model's 16x32 w1 st3")


def test_an_eager_call_follows_the_power_limit_of_a_device_that_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [700.0]
    monkeypatch.setattr(nvidia_source, "power_limit", lambda uuid: limit[0])
    monkeypatch.setattr(chain, "device_profile", lambda device: H200)
    touch()
    store(Table(identity_of(H200), (entry(),)))
    caches = [torch.empty(16, 16, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    table, lens = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((3, 16), (3,)))
    query = torch.empty(3, 32, 128, dtype=torch.bfloat16, device="meta")
    call = AttentionCall.of(query, *caches, table, lens)

    def eager(launch: Launcher) -> None:
        monkeypatch.setattr(chain, "_launch", launch)
        chain.run(PAGED_ATTENTION, call)

    def tile() -> tuple[int, ...]:
        launch = record(lambda launch: eager(launch))[0]
        return launch.arguments["BLOCK_N"], launch.options["num_warps"], launch.options["num_stages"]

    measured_tile = (SLOWER.block_n, SLOWER.num_warps, SLOWER.num_stages)
    assert tile() == measured_tile != (32, 1, 3)
    limit[0] = 350.0
    assert tile() == measured_tile  # nobody has looked
    refresh()
    assert tile() == (32, 1, 3)


def test_an_exported_table_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    file.write_text(json.dumps(Table(identity_of(H200), (entry(),)).to_dict()))
    assert table_from(json.loads(file.read_text()), "file") == Table(identity_of(H200), (entry(),))
    result = CliRunner().invoke(app, ["tune", "--import", str(file)])
    assert result.exit_code == 0, result.output
    assert first()[0] == tile_of(SLOWER)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "There is nothing to do."),
        (["--case", "b1 c16 write"], "is a cache write"),
        (["--case", "b1 c16 x"], "has a part 'x'"),
        (["--import", "nowhere.json"], "nowhere.json cannot be read"),
        (["--import", __file__], "is no table of measured tiles"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())


def test_cases_of_one_shape_are_tuned_together() -> None:
    names = ["h8-8 d64 b1 c64", "b1 c64", "h8-8 d64 b4 c4096", "h8-8 d64 b4 c64 q4", "h8-8 d64 b1 c9000 q2048"]
    groups = shapes([parse_case(name) for name in names])
    assert [[case.name for case in group] for group in groups] == [
        ["h8-8 d64 b1 c64", "h8-8 d64 b4 c4096"],
        ["h32-8 d128 b1 c64"],
        ["h8-8 d64 b4 c64 q4", "h8-8 d64 b1 c9000 q2048"],
    ]


def test_memory_is_bounded() -> None:
    case = parse_case("b64 c8192")  # 2 GiB of KV cache
    assert copies_of(case, 2.2e9) == 1
    assert copies_of(case, 4.4e9) == 2
    with pytest.raises(ArgumentError, match=r"KV cache of 2\.1 GB, where 1 GB are allowed"):
        tune([case], H200, memory=1e9, device="cpu")


@pytest.mark.gpu
def test_a_shape_is_tuned_on_the_gpu_and_its_result_is_used(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    cases = ["--case", "h8-2 d64 b2 c512", "--case", "h8-2 d64 b16 c512"]
    result = CliRunner().invoke(app, ["tune", *cases, "--seconds", "15", "--memory", "0.5", "--export", str(file)])
    assert result.exit_code == 0, result.output
    print(result.output)
    table = table_from(json.loads(file.read_text()), "the export")
    assert table.identity == identity_of(tcport.device_profile("cuda"))
    for each in table.entries:
        assert each.gain >= 1.02
        assert f"{each.gain:.3f}" in result.output
