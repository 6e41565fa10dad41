"""The rows of the registry: which family of GPUs gets which kernels and options, and how a third party adds one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcport.device import DeviceProfile, catalogue_profile
from tcport.ir import AttentionSpec, KVLayout, TileConfig
from tcport.kernels.call import AttentionCall
from tcport.kernels.offline import record
from tcport.lowering import targets
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.launch_options import with_options
from tcport.lowering.registry import register_lowering, select, unregister_lowering
from tcport.lowering.targets import TARGETS, refusal
from tcport.tiling.example import attention_call


def spec(form: str = "decode", dim: int = 128) -> AttentionSpec:
    layout = KVLayout(16, 16 * 8 * dim, 8 * dim, dim, 1)
    return AttentionSpec(
        form, 8, 8, 4096, 32, 8, dim, dim, "bfloat16", "bfloat16", layout, layout  # type: ignore[arg-type]
    )  # fmt: skip


def device(vendor: str, arch: str) -> DeviceProfile:
    """A made-up device of a family, with shared memory and registers of a common size."""
    width = 64 if arch.startswith("gfx9") else 16 if vendor == "intel" else 32
    facts: dict[str, Any] = {"shared_per_cta": 65536, "shared_per_cta_optin": 65536, "warp_width": width}
    return DeviceProfile(vendor, "xpu" if vendor == "intel" else "cuda", arch=arch, compute_units=64, **facts)  # type: ignore[arg-type]


def options(vendor: str, arch: str, form: str = "decode") -> dict[str, Any]:
    first = select("paged_attention", spec(form), device(vendor, arch)).candidates[0]
    assert (first.kernel, first.tier) == ("triton_decode" if form == "decode" else "triton_prefill", "tuned")
    return dict(first.options)


FAMILIES = {
    "nvidia": ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    "amd": ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
    "intel": ("pvc", "bmg", "dg2"),
}


@pytest.mark.parametrize(("vendor", "arch"), [(v, a) for v, archs in FAMILIES.items() for a in archs])
def test_every_family_has_a_chain_that_ends_in_torch(vendor: str, arch: str) -> None:
    candidates = select("paged_attention", spec(), device(vendor, arch)).candidates
    assert [c.tier for c in candidates][-1] == "torch"
    assert {c.kernel for c in candidates} == {"triton_decode", "torch_attention"}
    assert len({str(c) for c in candidates}) == len(candidates)


def test_options_differ_where_the_hardware_does() -> None:
    cdna = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    assert options("amd", "gfx90a") == {**cdna, "kpack": 2}
    assert options("amd", "gfx942") == {**cdna, "kpack": 2}
    assert options("amd", "gfx950") == {**cdna, "kpack": 1}
    assert options("amd", "gfx942", "varlen")["waves_per_eu"] == 0
    for vendor, arch in (("amd", "gfx1100"), ("amd", "gfx1201"), ("nvidia", "sm_90"), ("nvidia", "sm_75")):
        assert options(vendor, arch) == {}


def test_a_large_accumulator_on_xe_takes_the_large_register_file() -> None:
    target = next(t for t in TARGETS if t.arch == "pvc")
    # 64 rows x 128 columns x 4 bytes over 4 threads: 8 KiB each, as much as 128 registers of 64 bytes.
    assert target.options(spec(), TileConfig(64, 64, 4, 1)) == {"grf_mode": "256"}
    assert target.options(spec(), TileConfig(16, 64, 4, 1)) == {}


def test_the_vendor_is_decided_before_any_number() -> None:
    """A gfx device whose runtime calls itself 9.4 must not be taken for an sm_94."""
    assert options("amd", "sm_90") == {}


def test_tiles_of_amd_and_intel_hold_whole_matrix_instructions() -> None:
    """16 rows is the floor on both: WMMA and the narrow MFMA have 16x16, and DPAS 8x16 twice."""
    for target in TARGETS:
        for rows, columns in ((8, 64), (24, 64), (16, 8)):
            said = refusal(target, TileConfig(rows, columns, 4, 1))
            assert (said is None) == (target.vendor == "nvidia"), target
        assert refusal(target, TileConfig(16, 16, 4, 1)) is None
    for vendor, archs in FAMILIES.items():
        for candidate in [
            c for arch in archs for c in select("paged_attention", spec(), device(vendor, arch)).candidates
        ]:
            assert candidate.config is None or candidate.config.block_m >= 16


@pytest.mark.parametrize(("version", "stages"), [("3.6.0", 3), ("3.7.1+rocm", 3), ("3.8.0", 4), ("3.10.0", 4)])
def test_amd_has_no_four_stages_where_triton_does_not_build_them(
    version: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "triton_version", lambda: version)
    for vendor, arch, most in (("amd", "gfx942", stages), ("amd", "gfx1100", stages), ("nvidia", "sm_80", 4)):
        profile = device(vendor, arch)
        refused = [
            stages for stages in (1, 2, 3, 4) if refusal(targets.target_of(profile), TileConfig(16, 32, 4, stages))
        ]
        assert refused == [stages for stages in (1, 2, 3, 4) if stages > most], arch
        tiles = [c.config for c in select("paged_attention", spec(), profile).candidates]
        assert max(tile.num_stages for tile in tiles if isinstance(tile, TileConfig)) <= most, arch


def test_the_cpu_has_no_triton() -> None:
    selection = select("paged_attention", spec(), catalogue_profile("h200").replace(vendor="cpu"))
    reasons = {r.kernel: r.reason for r in selection.rejections}
    assert reasons["triton_decode"] == "Triton has no CPU target"


def test_a_third_party_row_for_one_family() -> None:
    def mine(spec: AttentionSpec, profile: DeviceProfile) -> Candidate | Verdict:
        return Candidate("mine", "tuned", lambda call, launch: None)

    register_lowering("paged_attention", name="mine", vendor="amd", arch="gfx94*", priority=5)(mine)
    try:
        assert select("paged_attention", spec(), device("amd", "gfx942")).candidates[0].kernel == "mine"
        other = select("paged_attention", spec(), device("amd", "gfx90a"))
        assert {r.kernel: r.reason for r in other.rejections}["mine"] == (
            "made for architectures gfx94*, the device is gfx90a"
        )
        nvidia = select("paged_attention", spec(), device("nvidia", "sm_90"))
        assert {r.kernel: r.reason for r in nvidia.rejections}["mine"] == "made for vendor amd, the device is nvidia"
    finally:
        unregister_lowering("paged_attention", "mine")


def test_options_reach_the_launch_and_the_trace() -> None:
    candidate = select("paged_attention", spec(), device("amd", "gfx942")).candidates[0]
    call = attention_call(spec())
    launches = record(lambda call, launch: candidate.run(call, launch), call)
    assert launches[0].options["kpack"] == 2
    assert launches[0].options["num_warps"] == candidate.config.num_warps  # type: ignore[union-attr]
    seen = []

    def launch(kernel: Any) -> Any:
        seen.append(kernel)
        return {(1,): lambda **arguments: seen.append(arguments)}

    launch.traced = True  # type: ignore[attr-defined]
    with_options(launch, {"kpack": 2})(_kernel())[(1,)](x=1, num_warps=8, num_stages=2)
    configs, arguments = seen[0].configs, seen[1]
    assert [(c.kwargs, c.num_warps, c.num_stages) for c in configs] == [({"kpack": 2}, 8, 2)]
    assert arguments == {"x": 1}


def _kernel() -> Any:
    from tcport.kernels.triton_combine import combine_kernel

    return combine_kernel


def test_traced_options_become_part_of_the_graph() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    small = spec(dim=16)
    candidate = select("paged_attention", small, device("amd", "gfx942")).candidates[0]
    example = attention_call(small)

    def run(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> Any:
        return candidate.run(AttentionCall.of(query, k, v, table, lens), torch.library.wrap_triton)

    tensors = (example.query, example.k_cache, example.v_cache, example.block_table, example.seq_lens)
    graph = make_fx(run, tracing_mode="fake")(
        *(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors)
    )
    kernels = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    assert kernels
    assert all("num_warps" not in n.kwargs["kwargs"] for n in kernels)
