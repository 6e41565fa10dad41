"""The comparisons of ``bench --suite fusions``: inputs, checks and arithmetic; times are taken on a GPU only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tcport.bench.accuracy import WrongResultError
from tcport.bench.fusion_cases import fusions, int4_matmul, norm_quantise, rope_write
from tcport.bench.fusions import OURS, Fusion, FusionRow, check_fusion
from tcport.cli import app

SMALL = {
    "rope": rope_write(5, heads=(4, 2), dim=32),
    "int4": int4_matmul(3, 256, 48),
    "norm": norm_quantise(4, 96, by_row=False),
    "norm by row": norm_quantise(4, 96, by_row=True),
}


@pytest.mark.parametrize("name", SMALL)
def test_ours_and_peers_compute_what_fp32_does(name: str) -> None:
    fusion = SMALL[name]
    runs = {OURS: fusion.ours, **{name: peer.run for name, peer in fusion.peers.items() if peer.checked}}
    for who, run in runs.items():
        assert check_fusion(fusion, who, run, fusion.make(torch.device("cpu"))) <= fusion.tolerance


def wrong_ways(fusion: Fusion) -> list[Any]:
    """Runs that leave a result as it was, and runs whose first result is off by a tenth, NaN or zeros."""

    def spoilt(inputs: Any, how: Any) -> Any:
        returned = fusion.ours(inputs)
        first = returned if isinstance(returned, torch.Tensor) else returned[0]
        how(first)
        return returned

    changes = (lambda t: t.mul_(1.1), lambda t: t.fill_(torch.nan), lambda t: t.zero_())
    return [lambda inputs, how=how: spoilt(inputs, how) for how in changes]


@pytest.mark.parametrize("name", SMALL)
def test_wrong_results_are_refused(name: str) -> None:
    fusion = SMALL[name]
    for run in wrong_ways(fusion):
        with pytest.raises(WrongResultError, match="results of somebody are off by"):
            check_fusion(fusion, "somebody", run, fusion.make(torch.device("cpu")))


def test_a_write_that_is_left_out_is_noticed() -> None:
    fusion = SMALL["rope"]
    with pytest.raises(WrongResultError):
        check_fusion(fusion, OURS, lambda call: fusion.expected(call)[0], fusion.make(torch.device("cpu")))


def test_bytes_are_those_of_the_tensors() -> None:
    inputs = SMALL["int4"].make(torch.device("cpu"))
    tensors = (inputs.x, inputs.packed, inputs.scales, inputs.zeros)
    out = 3 * 48 * 2
    assert SMALL["int4"].moved == sum(t.numel() * t.element_size() for t in tensors) + out
    assert SMALL["norm"].moved == 4 * 96 * (2 + 2 + 2 + 1)
    assert SMALL["rope"].moved == 5 * 32 * 2 * 2 * (4 + 2 + 2)


def test_inputs_outgrow_the_largest_cache_of_a_gpu_of_today() -> None:
    for fusion in fusions():
        assert fusion.copies * fusion.held > 60e6, fusion.name
        assert fusion.copies >= 2


def test_goals() -> None:
    row = FusionRow("one", {OURS: 2.0, "slow": 6.0, "copy": 1.5, "other": 1.0}, 0.0, 8, {"slow": 2.5, "copy": 0.85})
    assert row.ratios == {"slow": 3.0, "copy": 0.75, "other": 0.5}
    assert row.missed == ["copy"]
    assert row.to_dict()["ratios"]["slow"] == 3.0


@pytest.mark.parametrize("extra", [["--case", "b1 c16"], ["--plot", "a.png"]])
def test_the_suite_takes_no_cases_of_attention(extra: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "--suite", "fusions", *extra])
    assert result.exit_code == 1
    assert "takes no --case" in " ".join(result.output.split())


@pytest.mark.gpu
def test_a_comparison_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcport.bench.fusion_cases.fusions", lambda: list(SMALL.values()))
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["bench", "--suite", "fusions", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert '"ratios"' in file.read_text()
