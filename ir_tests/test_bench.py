"""The bench's own arithmetic, inputs and checks; times are taken on a GPU only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tcport
from tcport.bench.accuracy import WrongResultError, check
from tcport.bench.bound import _parts
from tcport.bench.cases import SUITES, Case, parse_case, ragged
from tcport.bench.command import chosen_cases, chosen_peers, draw
from tcport.bench.inputs import Inputs, make_inputs
from tcport.bench.peers import PEERS
from tcport.cli import app
from tcport.errors import ArgumentError

SMALL = {
    "decode": Case("decode", (40, 7, 33), heads=(6, 2), dims=(24, 16), page=4),
    "verify": Case("decode", (40, 9), (3, 3), heads=(4, 2), dims=(16, 16)),
    "chunk": Case("prefill", (40, 40), (8, 8), heads=(4, 2), dims=(16, 16), dtype="float32", kv_dtype="float32"),
    "prompt": Case("prefill", (20,), (20,), heads=(4, 4), dims=(16, 16), dtype="float16", kv_dtype="float16"),
    "fp8": Case("decode", (40, 40), heads=(4, 1), dims=(32, 32), kv_dtype="float8_e4m3fn"),
}


def ours(inputs: Inputs) -> torch.Tensor:
    return tcport.paged_attention(**inputs.arguments)


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("b64 c8192", Case("decode", (8192,) * 64)),
        ("h40-8 d96 b2 c512 p32 fp16", Case("decode", (512,) * 2, None, (40, 8), (96, 96), 32, "float16", "float16")),
        ("h16 d192-128 b1 c64", Case("decode", (64,), None, (16, 16), (192, 128))),
        ("b8 c2048 q4 kv:fp8", Case("decode", (2048,) * 8, (4,) * 8, kv_dtype="float8_e4m3fn")),
        ("b1 c16384 q2048", Case("prefill", (16384,), (2048,))),
        ("b1 c8192 write", Case("write", (8192,))),
    ],
)
def test_cases_are_spelt(text: str, case: Case) -> None:
    assert parse_case(text) == case


@pytest.mark.parametrize("text", ["", "h32-8", "b8", "b0 c8", "b8 c16 x4", "b8 c16 kv:fp9", "b-1 c4", "bf16"])
def test_misspelt_cases_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="[Ss]pell"):
        parse_case(text)


def test_names_of_suites_spell_their_cases() -> None:
    for case in (
        case for suite in SUITES.values() for case in suite if not case.label and case.dims[0] == case.dims[1]
    ):
        assert parse_case(case.name) == case


def test_bytes_and_operations() -> None:
    decode = parse_case("b64 c8192")
    assert decode.kv_bytes == 2_147_483_648  # 64 x 8192 x 8 heads x 2 x 128 x 2 bytes
    assert decode.flops == 4 * 64 * 8192 * 32 * 128
    assert parse_case("b64 c8192 kv:fp8").kv_bytes == 1_073_741_824
    assert parse_case("b1 c3 q3 h1-1 d1").flops == 4 * (1 + 2 + 3)
    assert parse_case("b1 c5 q2 h1-1 d1").flops == 4 * (4 + 5)


def test_ragged_lengths_span_their_range_evenly_in_the_logarithm() -> None:
    lens = ragged(11, 32, 32768)
    assert sorted(lens) == [2**power for power in range(5, 16)]
    assert lens == ragged(11, 32, 32768)
    assert list(lens) != sorted(lens)


@pytest.mark.parametrize("name", SMALL)
def test_right_results_pass_and_wrong_ones_do_not(name: str) -> None:
    (inputs,) = make_inputs(SMALL[name], "cpu", copies=1)
    out = ours(inputs)
    assert check(inputs, out) < 0.02
    for wrong in (out * 1.05, out.roll(1, dims=0), torch.full_like(out, torch.nan), torch.zeros_like(out)):
        with pytest.raises(WrongResultError, match="results are off by"):
            check(inputs, wrong)


def test_copies_share_nothing_and_pages_are_in_no_order() -> None:
    first, second = make_inputs(SMALL["decode"], "cpu", copies=2)
    assert first.arguments["k_cache"].data_ptr() != second.arguments["k_cache"].data_ptr()
    table = first.arguments["block_table"]
    used = [table[row, : -(-length // 4)] for row, length in enumerate((40, 7, 33))]
    assert sorted(torch.cat(used).tolist()) == list(range(21))
    assert torch.cat(used).tolist() != list(range(21))


def test_writes_are_checked_where_they_went() -> None:
    (inputs,) = make_inputs(Case("write", (9,), heads=(4, 2), dims=(16, 8)), "cpu", copies=1)
    with pytest.raises(WrongResultError):
        check(inputs)
    tcport.kv_write(**inputs.arguments)
    assert check(inputs) == 0.0


@pytest.mark.parametrize("peer", ["gather + SDPA", "index_put"])
@pytest.mark.parametrize("name", ["verify", "chunk", "prompt", "write"])
def test_peers_are_right_or_say_why_not(peer: str, name: str) -> None:
    case = Case("write", (9,), heads=(4, 2), dims=(16, 8)) if name == "write" else SMALL[name]
    if name == "verify":
        case = dataclasses.replace(case, lens=(40, 40))
    (inputs,) = make_inputs(case, "cpu", copies=1)
    reason = PEERS[peer].refuses(case)
    assert bool(reason) == ((name == "write") != (peer == "index_put"))
    if not reason:
        assert check(inputs, PEERS[peer].run(inputs, PEERS[peer].prepare(inputs))) < 0.02


def test_peers_refuse_what_they_cannot_do() -> None:
    refuses = PEERS["gather + SDPA"].refuses
    assert refuses(SMALL["decode"]) == "takes sequences of one length only"
    assert refuses(SMALL["fp8"]) == "takes a cache of the query's dtype only"


def test_chosen_cases_and_peers() -> None:
    own = parse_case("b1 c16")
    assert chosen_cases("all", ["b1 c16"]) == [own]
    assert chosen_cases("write", ["b1 c16"]) == [*SUITES["write"], own]
    assert chosen_cases("all", []) == [case for suite in SUITES.values() for case in suite]
    assert chosen_peers("none") == []
    assert chosen_peers("index_put, gather + SDPA") == ["index_put", "gather + SDPA"]
    with pytest.raises(ArgumentError, match="no peer 'vllm'"):
        chosen_peers("vllm")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "dcode"], "no suite 'dcode'"),
        (["--case", "b8"], "no batch"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
        (["--plot", "times.txt"], "no picture"),
    ],
)
def test_bad_arguments_measure_nothing(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())


def test_the_picture_has_a_bar_for_each_time(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "one", "bound": 10.0, "times": {"tcport": 11.0, "gather + SDPA": 40.0}},
        {"name": "two", "bound": 5.0, "times": {"tcport": 6.0}},
    ]
    draw(rows, tmp_path / "times.svg")
    text = (tmp_path / "times.svg").read_text()
    assert text.startswith("<?xml")
    assert "gather + SDPA" in text or "gather" in text


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=20).map(tuple),
    st.sampled_from([32, 64]),
    st.integers(1, 300),
)
def test_the_yardstick_reads_every_key_once_in_parts_of_much_the_same_length(
    lens: tuple[int, ...], block: int, number: int
) -> None:
    parts = _parts(lens, block, number, torch.device("cpu")).tolist()
    read: dict[int, list[tuple[int, int]]] = {}
    for seq, begin, end in parts:
        read.setdefault(seq, []).append((begin, end))
    for seq, keys in enumerate(lens):
        spans = sorted(read[seq])
        assert spans[0][0] == 0
        assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]
        assert spans[-1][1] == keys
    assert len(parts) <= number + len(lens)
    longest = -(-sum(-(-keys // block) for keys in lens) // number) * 3 // 2 + 1
    assert max(end - begin for _, begin, end in parts) <= longest * block
