"""The command line without a GPU: plans for devices that are not in the room, the catalogue, refusals."""

import json
import re

import pytest
from test_tiling_rank import decode_spec
from typer.testing import CliRunner

from tcport.cli import app
from tcport.device import catalogue_profile
from tcport.lowering.spec import opened
from tcport.tiling.plan import make_plan

run = CliRunner().invoke


def test_plan_prints_ranking_terms_and_rejections():
    result = run(app, ["plan", "--device", "rtx4090", "--dim", "256", "--no-compile", "--top", "2"])
    assert result.exit_code == 0
    assert "decode on NVIDIA GeForce RTX 4090 (sm_89)" in result.output
    assert "shared memory of a CTA = " in result.output
    assert "t_call = " in result.output
    assert "exceeds the limit of" in result.output


def test_plan_as_json_has_every_config_and_its_reason():
    arguments = ["plan", "--device", "t4", "--hq", "28", "--hkv", "4", "--page", "1056", "--no-compile", "--json"]
    data = json.loads(run(app, arguments).output)
    assert data["kernel"] == "decode"
    assert data["device"]["arch"] == "sm_75"
    assert all(config["seconds"] > 0 for config in data["configs"])
    assert all("exceeds the limit" in rejected["reason"] for rejected in data["rejected"])
    assert data["compiled"] is None


def test_plan_ends_with_the_chain():
    arguments = ["plan", "--no-compile", "--device", "h200", "--tokens", "4096"]
    lines = run(app, arguments).output.splitlines()
    chain = lines[lines.index("chain, as the call would try it:") + 1 :]
    assert chain[0] == "  hopper_prefill [tuned] 128x128 w4 st2"
    assert chain[1].startswith("  triton_prefill [tuned] ")
    assert chain[-1] == "  torch_attention [torch]"
    assert json.loads(run(app, [*arguments, "--json"]).output)["chain"] == [line.strip() for line in chain]


def test_plan_says_which_sizes_its_figures_are_for():
    arguments = ["plan", "--device", "rtx4090", "--no-compile", "--top", "1"]
    said = (
        "over 12 calls with 1 to 256 sequences of 512 to 32768 keys, the terms below are for 16 sequences of 4096 keys."
    )
    assert said in " ".join(run(app, [*arguments, "--eager"]).output.split())
    assert "\nEstimates are for 64 sequences of 8192 keys.\n" in run(app, arguments).output
    data = json.loads(run(app, [*arguments, "--eager", "--json", "--batch", "2", "--context", "128"]).output)
    assert data["sizes"] == "Estimates are for 16 sequences of 128 keys."  # the kind of small batches
    assert json.loads(run(app, ["plan", "--device", "cpu", "--json"]).output)["sizes"] == ""


def test_plan_of_an_eager_call_is_that_of_its_kind_cut_for_this_one():
    """A kind holds all sizes, small decode batches apart: equal tiles whatever the batch, whose sizes cut them."""

    def planned(batch, context):
        sizes = ["--batch", str(batch), "--context", str(context)]
        return json.loads(run(app, ["plan", "--device", "h200", "--no-compile", "--json", "--eager", *sizes]).output)

    small, one, many, even = (planned(*sizes) for sizes in ((16, 128), (1, 8192), (999, 64), (8, 8192)))
    assert small["configs"] != one["configs"] == many["configs"] == even["configs"]
    assert small["chain"][0] == "triton_decode [tuned] 16x128 w4 st1"  # whole: its keys are one tile
    assert "C" in one["configs"][0]["num_splits"]  # cut by the context, whatever that is
    tile = "triton_decode [tuned] {block_m}x{block_n} w{num_warps} st{num_stages}".format(**one["configs"][0])
    splits = re.fullmatch(rf"{re.escape(tile)} splits (\d+)", one["chain"][0])
    assert splits is not None
    assert 16 <= int(splits[1]) <= 128  # 8 KV heads for 132 units
    assert many["chain"][0].startswith(tile)
    assert many["chain"][0] == tile  # more sequences than units, and less than one tile of keys
    assert re.fullmatch(rf"{re.escape(tile)} parts \d+", even["chain"][0])  # by the lengths, of however many there are


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h20"], "Did you mean"),
        (["--device", "h200", "--hq", "7", "--hkv", "2"], "7 query heads and 2 KV heads"),
        (["--device", "h200", "--dtype", "bf17"], "'bf17'"),
        (["--device", "h200", "--batch", "0"], "batch is 0. It must be at least 1."),
        (["--device", "h200", "--eager", "--context", "-1"], "context is -1. It must be at least 1."),
        (["--device", "h200", "--tokens", "0"], "tokens is 0. It must be at least 1."),
        (["--device", "cpu", "--page", "0"], "page is 0. It must be at least 1."),
        (
            ["--device", "t4", "--hq", "128", "--hkv", "1", "--dim", "576", "--dim-v", "512", "--latent"],
            "No decode tile",
        ),
    ],
)
def test_refusals_are_sentences(arguments, message):
    result = run(app, ["plan", "--no-compile", *arguments])
    assert result.exit_code == 1
    assert message in result.output
    as_json = run(app, ["plan", "--no-compile", "--json", *arguments])
    assert message in json.loads(as_json.stdout)["refusal"]


def test_profile_files_are_taken(tmp_path):
    path = tmp_path / "slice.json"
    path.write_text('{"vendor": "nvidia", "arch": "sm_90", "compute_units": 14}')
    data = json.loads(run(app, ["plan", "--device", str(path), "--no-compile", "--json"]).output)
    assert data["device"]["compute_units"] == 14
    assert any("is unknown" in note for note in data["notes"])


def test_this_machines_cpu_is_a_device_too():
    """Its kernels are compiled with no tile in them, so there is no footprint of one, and no want of a compiler."""
    data = json.loads(run(app, ["plan", "--device", "cpu", "--json"]).output)
    assert data["device"]["device_type"] == "cpu"
    assert (data["compiled"], data["refusal"]) == (None, None)
    shown = run(app, ["plan", "--device", "cpu"])
    assert shown.exit_code == 0
    assert "the CPU's kernels take the block of keys and the splits" in shown.output
    assert "compiler" not in shown.output


def test_devices_lists_what_is_here_and_what_is_not():
    listed = json.loads(run(app, ["devices", "--json"]).output)
    assert "cpu" in listed["present"]
    assert len(listed["catalogue"]) == 17
    shown = run(app, ["devices"]).output
    assert "b580" in shown
    assert "warp_width" not in shown.partition("\ncpu: unknown: memory_bandwidth")[2].partition("\n")[0]
    assert "\ncpu: unknown: memory_bandwidth" in shown
    assert "a CPU has none" in listed["present"]["cpu"]["unknown"]["warp_width"]


def test_a_plan_for_open_sizes_is_plain_data():
    """Numbers that depend on sizes are written out."""
    plan = make_plan(opened(decode_spec()), catalogue_profile("h200"), check=False)
    first = json.loads(json.dumps(plan.to_dict()))["configs"][0]
    assert "B" in first["num_splits"]
    assert "B" in first["parts"]
