"""Bundles: built for a GPU that is not there, and refused wherever they do not belong."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from typer.testing import CliRunner

from tcport import chain, quarantine
from tcport.bundle import read_bundle, store
from tcport.bundle.command import app, read_specs
from tcport.bundle.launch import find
from tcport.bundle.manifest import MANIFEST, Bundle, Entry
from tcport.device import catalogue_profile
from tcport.errors import ArgumentError, BundleError
from tcport.ir import AttentionSpec
from tcport.kernels import cpu_library
from tcport.kernels.offline import Launch, record
from tcport.kernels.target import targeting
from tcport.kernels.triton_decode import paged_decode
from tcport.lowering.operators import PAGED_ATTENTION, NodeChoice
from tcport.lowering.registry import select
from tcport.tiling.example import attention_call
from tcport.tiling.footprint import compile_target
from tcport.tiling.plan import plain_spec
from tcport.tiling.sources import kernel_sources
from tcport.tiling.wire import config_of

H200, A100 = catalogue_profile("h200"), catalogue_profile("a100")
SPECS = [{"num_q_heads": 4, "num_kv_heads": 2, "dim_qk": 16, "dtype": "float16"}]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle as the command builds it; tests that spoil it take a copy."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "specs.json").write_text(json.dumps(SPECS))
    arguments = ["build", "--device", "h200", "--spec", str(folder / "specs.json"), "-o", str(folder / "out")]
    done = CliRunner().invoke(app, [*arguments, "--tiles", "1"])
    assert done.exit_code == 0, done.output
    return folder / "out"


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


@pytest.fixture
def spec(built: Path) -> AttentionSpec:
    return read_specs(built.parent / "specs.json")[0]


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def refusal(bundle: Bundle, profile: Any = H200) -> str | None:
    return bundle.refusal(profile, compile_target(profile), kernel_sources())


def warps(entry: Entry) -> int:
    """The tile's; four for the merge of many splits."""
    return 4 if entry.constants.get("BLOCK_S") == 64 else entry.tile["num_warps"]


def test_what_was_built(built: Path) -> None:
    bundle = read_bundle(built)
    assert bundle.target == ("cuda", 90, 32)
    assert {e.function for e in bundle.entries} == {"paged_attention_kernel", "combine_kernel", "kv_write_kernel"}
    assert bundle.faults() == []
    assert refusal(bundle) is None
    assert bundle.cpu_library("another") is None
    library = bundle.cpu_library(cpu_library.identity())
    assert library is not None
    assert library.read_bytes() == cpu_library.build().read_bytes()
    for entry in bundle.entries:
        assert bundle.binary(entry)[:4] == b"\x7fELF"
        assert entry.symbol.encode() in bundle.binary(entry)
        assert 0 <= entry.shared <= (H200.shared_per_cta_optin or 0)
        assert entry.threads == 32 * warps(entry)


def test_a_bundle_for_amd_holds_hsacos_for_it_alone(built: Path, tmp_path: Path) -> None:
    specs = str(built.parent / "specs.json")
    done = CliRunner().invoke(
        app, ["build", "--device", "mi300x", "--spec", specs, "-o", str(tmp_path), "--tiles", "1"]
    )
    assert done.exit_code == 0, done.output
    bundle = read_bundle(tmp_path)
    assert bundle.target == ("hip", "gfx942", 64)
    assert {e.function for e in bundle.entries} == {"paged_attention_kernel", "combine_kernel", "kv_write_kernel"}
    for entry in bundle.entries:
        assert entry.file.endswith(".hsaco")
        # An ELF file for AMD's GPUs, machine number 224, as the AMDGPU back end's documentation has it.
        assert (bundle.binary(entry)[:4], bundle.binary(entry)[18:20]) == (b"\x7fELF", (224).to_bytes(2, "little"))
        assert entry.symbol.encode() in bundle.binary(entry)
        assert entry.threads == 64 * warps(entry)
        assert entry.shared <= 65536
    assert refusal(bundle, catalogue_profile("mi300x")) is None
    assert refusal(bundle) == f"{tmp_path} was built for hip gfx942, the device is cuda 90"


def test_a_flipped_byte_a_missing_file_and_a_missing_manifest(copy: Path) -> None:
    first, second = read_bundle(copy).entries[:2]
    data = bytearray((copy / first.file).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / first.file).write_bytes(data)
    (copy / second.file).unlink()
    bundle = read_bundle(copy)
    with pytest.raises(BundleError, match="corrupt"):
        bundle.binary(bundle.entries[0])
    with pytest.raises(BundleError, match="cannot be read"):
        bundle.binary(bundle.entries[1])
    assert len(bundle.faults()) == 2
    (copy / MANIFEST).write_text("{")
    with pytest.raises(BundleError, match="no manifest"):
        read_bundle(copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        read_bundle(copy)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an entry is no object": (lambda m: m["entries"].append("x"), "an entry is no JSON object"),
    "a tile is short": (lambda m: m["entries"][0]["tile"].pop("block_n"), "a tile has no block_n"),
    "a tile has words": (lambda m: m["entries"][0]["tile"].update(block_m="16"), "no block_m that is of type int"),
    "facts are a list": (lambda m: m["entries"][0].update(facts=[1]), "no facts that is of type dict"),
    "a digest is a number": (lambda m: m["entries"][0].update(sha256=3), "no sha256 that is of type str"),
    "a file is the folder": (lambda m: m["entries"][0].update(file=""), "lies outside the bundle"),
    "a file is the folder above": (lambda m: m["entries"][0].update(file=".."), "lies outside the bundle"),
    "the CPU's part is cut": (lambda m: m["cpu"].pop("identity"), "cpu has no identity"),
    "the CPU's part is a word": (lambda m: m.update(cpu="x"), "cpu is no JSON object"),
    "a target is short": (lambda m: m["target"].pop(), "expected 3, got 2"),
    "a parameter has neither type nor value": (
        lambda m: m["entries"][0]["constants"].clear(),
        "has neither a type nor a value",
    ),
    "a parameter has a type that is none": (
        lambda m: m["entries"][0]["signature"].update(seq_lens="i33"),
        "seq_lens is of the type 'i33'",
    ),
    "a parameter's type is a number": (
        lambda m: m["entries"][0]["signature"].update(seq_lens=3),
        "seq_lens is of the type 3",
    ),
    "something else is aligned": (lambda m: m["entries"][0].update(aligned=["x"]), "'x' is aligned and no parameter"),
    "no thread": (lambda m: m["entries"][0].update(threads=0), "threads is out of range"),
    "much shared memory": (lambda m: m["entries"][0].update(shared=2**40), "shared is out of range"),
    "a block of no rows": (lambda m: m["entries"][0]["tile"].update(block_m=0), "block_m is out of range"),
    "entries are gone": (lambda m: m.pop("entries"), "the bundle has no entries"),
    "a field of a later version": (lambda m: m.update(later=1), "unexpected keyword argument 'later'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_refused_whole_and_costs_the_bundle_alone(
    damage: str, copy: Path, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = DAMAGE[damage]
    edit(copy, change)
    with pytest.raises(BundleError, match=f"is no manifest: .*{reason}"):
        read_bundle(copy)
    assert CliRunner().invoke(app, ["verify", str(copy), "--device", "h200"]).exit_code == 2
    monkeypatch.setenv("TCPORT_BUNDLE", str(copy))
    chosen = select("paged_attention", spec, H200)
    assert reason in {r.kernel: r.reason for r in chosen.rejections}["bundle_attention"]


@pytest.mark.parametrize("written", [b"", b"[" * 100_000, b"null", b"\xff" * 5000, b"\xef\xbb\xbf{}"])
def test_what_is_no_json_is_no_manifest(written: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(written)
    with pytest.raises(BundleError, match="is no manifest") as caught:
        read_bundle(tmp_path)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_foreign_an_old_and_a_stale_bundle(copy: Path) -> None:
    assert refusal(read_bundle(copy), A100) == f"{copy} was built for cuda 90, the device is cuda 80"
    edit(copy, lambda manifest: manifest.update(sources="0" * 64))
    assert "other kernel sources" in str(refusal(read_bundle(copy)))
    edit(copy, lambda manifest: manifest.update(abi=99))
    assert "launch convention 99" in str(refusal(read_bundle(copy)))
    edit(copy, lambda manifest: manifest["entries"][0].update(file="../elsewhere"))
    with pytest.raises(BundleError, match="outside the bundle"):
        read_bundle(copy)


def launches(spec: AttentionSpec, bundle: Bundle, splits: int = 4) -> list[Launch]:
    tile = next(e.tile for e in bundle.entries if e.kernel == "triton_decode")
    with targeting(GPUTarget("cuda", 90, 32)):
        return record(paged_decode, attention_call(spec), config_of({**tile, "num_splits": splits}))


def test_a_launch_finds_what_was_compiled_for_it_and_nothing_else(built: Path, spec: AttentionSpec) -> None:
    bundle = read_bundle(built)
    attention, combine = launches(spec, bundle)
    entry = find(bundle.entries, attention.kernel, attention.arguments)
    assert entry.function == "paged_attention_kernel"
    assert "k_stride_token" in entry.aligned
    few = find(bundle.entries, combine.kernel, combine.arguments)
    _, combine = launches(spec, bundle, splits=9)
    many = find(bundle.entries, combine.kernel, combine.arguments)
    assert (few.function, many.function) == ("combine_kernel", "combine_kernel")
    assert (few.constants["BLOCK_S"], many.constants["BLOCK_S"], many.threads) == (16, 64, 128)
    odd = find(bundle.entries, attention.kernel, {**attention.arguments, "k_stride_token": 33})
    assert odd.aligned == ()
    for name, value, said in (
        ("PAGE_SIZE", 32, "PAGE_SIZE is 32, compiled in is 16"),
        ("window", 5, "window is 5, compiled in is None"),
        ("seq_lens", torch.empty(4, dtype=torch.int64), r"seq_lens is a tensor of torch.int64, compiled for \*i32"),
        ("k_stride_page", 2**40, "k_stride_page is 1099511627776, compiled for i32"),
    ):
        with pytest.raises(BundleError, match=said):
            find(bundle.entries, attention.kernel, {**attention.arguments, name: value})
    renamed = types.SimpleNamespace(__name__="paged_attention_kernel", arg_names=["query"])
    with pytest.raises(BundleError, match="not those of the installed kernel"):
        find(bundle.entries, renamed, attention.arguments)


def test_the_chain_takes_a_bundle_before_torch(
    built: Path, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCPORT_BUNDLE", str(built))
    selection = select("paged_attention", spec, H200)
    assert [c.tier for c in selection.candidates][-2:] == ["blob", "torch"]
    reasons = {r.kernel: r.reason for r in select("paged_attention", spec, A100).rejections}
    assert reasons["bundle_attention"] == f"{built} was built for cuda 90, the device is cuda 80"
    other = plain_spec(
        num_q_heads=4, num_kv_heads=2, dim_qk=32, dim_v=32, page=16, batch=4, context=64, tokens=None,
        dtype="float16", kv_dtype="float16",
    )  # fmt: skip
    reasons = {r.kernel: r.reason for r in select("paged_attention", other, H200).rejections}
    assert reasons["bundle_attention"] == f"{built} has no kernel for this spec"
    monkeypatch.setenv("TCPORT_BUNDLE", "/nowhere")
    assert (
        "manifest.json cannot be read"
        in {r.kernel: r.reason for r in select("paged_attention", spec, H200).rejections}["bundle_attention"]
    )


def test_without_a_compiler_the_bundle_is_next(
    built: Path, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCPORT_BUNDLE", str(built))
    quarantine.clear()
    choice = NodeChoice(PAGED_ATTENTION, spec, select("paged_attention", spec, H200), H200)
    first = choice.selection.candidates[0]
    chain.step_down(choice, first, first, RuntimeError("Cannot find ptxas"), "toolchain")
    assert [c.tier for c in chain.survivors(choice)] == ["blob", "torch"]
    quarantine.clear()


def test_a_bundle_named_by_a_relative_path_is_the_one_it_was_when_it_was_read(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(built.parent)
    bundle = read_bundle(built.name)
    monkeypatch.chdir(tmp_path)
    assert bundle.faults() == []


def test_a_bundle_that_a_program_asked_for(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_asked", [])
    store.use_bundle(built)
    store.use_bundle(built)
    assert [b.folder for b in store.bundles()[0]] == [built]
    with pytest.raises(BundleError):
        store.use_bundle(built / "nothing")


def test_the_command_says_what_is_wrong(copy: Path) -> None:
    run = CliRunner().invoke
    assert run(app, ["verify", str(copy), "--device", "h200"]).exit_code == 0
    foreign = run(app, ["verify", str(copy), "--device", "a100"])
    assert foreign.exit_code == 1
    assert "was built for cuda 90" in foreign.output
    processor = run(app, ["verify", str(copy), "--device", "cpu"])
    assert processor.exit_code == 1
    assert "was built for cuda 90" in processor.output
    (copy / read_bundle(copy).entries[0].file).write_bytes(b"")
    broken = run(app, ["verify", str(copy), "--device", "h200"])
    assert broken.exit_code == 1
    assert "corrupt" in broken.output
    assert "paged_attention_kernel" in run(app, ["inspect", str(copy)]).output
    assert run(app, ["inspect", str(copy / "nothing")]).exit_code == 2


def test_specs_with_unknown_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "specs.json").write_text('[{"heads": 3}]')
    with pytest.raises(ArgumentError, match="names heads.*dim_v, kv_dtype"):
        read_specs(tmp_path / "specs.json")
    (tmp_path / "specs.json").write_text("[3]")
    with pytest.raises(ArgumentError, match="lists 3, which is no table"):
        read_specs(tmp_path / "specs.json")
