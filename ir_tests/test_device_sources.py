"""Vendor sources against stand-in runtimes: what is visible is what is reported, and silence has a reason."""

import pytest
import torch
from fake_runtimes import (
    MI300X,
    MIG_SLICE,
    SLICE_UUID,
    CudaResult,
    LevelZero,
    cuda_driver,
    hip_runtime,
    nvml_of_parent,
)

from tcport.device import amd_source
from tcport.device.sources import read_profile

CUDA = torch.device("cuda", 0)


def nvidia(driver=None, nvml=None, index=0):
    return read_profile(
        torch.device("cuda", index), "nvidia", driver=driver or cuda_driver(), nvml=nvml or nvml_of_parent()
    )


@pytest.mark.parametrize(
    "mask",
    [
        f"MIG-{SLICE_UUID}",
        "MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/2",
        "GPU-c6d4",
        "0",
        "",
        "-1",
        "0,,1",
        "0,0",
        "rubbish",
    ],
)
def test_the_slice_is_reported_whatever_the_mask_says(mask, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    profile = nvidia()
    assert (profile.compute_units, profile.memory_bytes) == (14, 10 << 30)
    assert profile.arch == "sm_90"
    assert profile.uuid == str(SLICE_UUID)
    assert repr(mask) in profile.notes[0]


def test_nvml_is_asked_by_uuid_and_only_for_what_the_driver_does_not_tell():
    profile = nvidia()
    assert profile.driver_version == "580.65.06"
    assert profile.source["driver_version"] == "NVML"
    assert profile.source["compute_units"] == "CUDA driver"
    assert profile.memory_bandwidth is None
    assert "MIG slice" in profile.unknown["memory_bandwidth"]
    whole = nvidia(nvml=nvml_of_parent(known=(f"GPU-{SLICE_UUID}",)))
    assert whole.memory_bandwidth == 2 * 3201e6 * 6144 / 8


def test_matrix_rate_follows_the_visible_units():
    assert nvidia().matrix_flops == 4096 * 14 * 1.98e9


def test_a_zero_is_unknown():
    assert nvidia().l2_bytes is None
    assert "reported as 0" in nvidia().unknown["l2_bytes"]


def test_nvml_that_knows_another_device_only_is_not_believed():
    profile = nvidia(nvml=nvml_of_parent(known=()))
    assert profile.driver_version is None
    assert str(SLICE_UUID) in profile.unknown["driver_version"]
    assert profile.compute_units == 14


def test_no_permission_is_a_reason():
    facts = {name: value for name, value in MIG_SLICE.items() if name != "CLOCK_RATE"}
    profile = nvidia(cuda_driver((facts,)), nvml_of_parent(permitted=False))
    assert profile.clock_hz is None
    assert profile.driver_version == "580.65.06"


def test_no_device_and_no_driver_are_reasons(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    none = nvidia(cuda_driver(init=CudaResult.CUDA_ERROR_NO_DEVICE))
    assert "CUDA_ERROR_NO_DEVICE" in none.unknown["compute_units"]
    hidden = nvidia(cuda_driver(devices=()))
    assert "CUDA_VISIBLE_DEVICES='-1' selects no device" in hidden.unknown["compute_units"]


def test_several_architectures_in_one_process():
    older = {**MIG_SLICE, "COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 5, "MULTIPROCESSOR_COUNT": 40}
    driver = cuda_driver((MIG_SLICE, older))
    first, second = nvidia(driver), nvidia(driver, index=1)
    assert (first.arch, first.compute_units, first.async_copy) == ("sm_90", 14, "tma")
    assert (second.arch, second.compute_units, second.async_copy) == ("sm_75", 40, "none")
    assert first.digest() != second.digest()


def test_old_driver_gives_basic_mode_and_says_so():
    assert nvidia().basic_mode is None
    assert "version 11.8" in nvidia(cuda_driver(version=11080)).basic_mode
    old = read_profile(CUDA, "amd", hip=hip_runtime(10, version=50422801))
    assert "version 5.4" in old.basic_mode


@pytest.mark.parametrize("release", [7, 10])
def test_both_call_forms_of_hip_python(release):
    profile = read_profile(CUDA, "amd", hip=hip_runtime(release))
    assert (profile.arch, profile.compute_units, profile.warp_width) == ("gfx942", 304, 64)
    assert profile.shared_per_cta_optin == 65536
    assert profile.runtime_version == "7.2.26015"
    assert profile.pci_bus_id == "0000:05:00.0"
    assert profile.max_registers_per_thread == 512
    assert profile.source["max_registers_per_thread"] == "instruction set of the target"
    assert "transfers per clock" in profile.unknown["memory_bandwidth"]


def test_hip_zeros_and_absence():
    profile = read_profile(CUDA, "amd", hip=hip_runtime(10, {**MI300X, "maxThreadsPerMultiProcessor": 0}))
    assert profile.max_threads_per_unit is None
    none = read_profile(CUDA, "amd", hip=hip_runtime(10, count=0))
    assert "hipErrorNoDevice" in none.unknown["compute_units"]


def test_gfx_override_is_compared_with_the_kernel_driver(tmp_path):
    for node, version in enumerate((0, 110501)):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"simd_count 80\ngfx_target_version {version}\n")
    note = amd_source.override_note({"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, tmp_path)
    assert note.endswith("report gfx1100, but the hardware is gfx1151.")
    same = amd_source.override_note({"HSA_OVERRIDE_GFX_VERSION": "11.5.1"}, tmp_path)
    assert "which is what the kernel driver reports" in same
    assert amd_source.override_note({}, tmp_path) is None
    assert "gfx90a" in amd_source.override_note({"HSA_OVERRIDE_GFX_VERSION": "9.0.10"}, tmp_path / "none")


def test_level_zero_reads_the_device_torch_means():
    """Integrated beside discrete: the discrete GPU is second in Level Zero's order."""
    profile = read_profile(torch.device("xpu", 1), "intel", loader=LevelZero())
    assert (profile.name, profile.arch, profile.integrated) == ("Intel(R) Arc(TM) B580 Graphics", "bmg", False)
    assert (profile.compute_units, profile.max_threads_per_unit) == (20, 1024)
    assert (profile.shared_per_cta_optin, profile.warp_width, profile.l2_bytes) == (131072, 16, 18 << 20)
    assert profile.runtime_version == "1.6"
    integrated = read_profile(torch.device("xpu", 0), "intel", loader=LevelZero())
    assert (integrated.compute_units, integrated.integrated, integrated.arch) == (4, True, "lnl")
    absent = read_profile(torch.device("xpu", 7), "intel", loader=LevelZero())
    assert "2 GPUs are visible" in absent.unknown["compute_units"]


def test_missing_runtimes_give_reasons_not_exceptions(monkeypatch):
    """Nothing is injected: on a machine without these libraries every fact is unknown, with a cause."""
    for vendor, device in (("nvidia", "cuda"), ("amd", "cuda"), ("intel", "xpu")):
        profile = read_profile(torch.device(device, 63), vendor)
        assert profile.compute_units is None
        assert profile.unknown["compute_units"].count(": ") >= 2
