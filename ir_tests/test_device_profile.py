"""Profiles: round trips, unknown facts, overrides."""

import pickle

import pytest
import torch

from tcport.device import DeviceProfile, device_profile, load_profile, override_profile, set_profile
from tcport.errors import ArgumentError

SLICE = DeviceProfile(vendor="nvidia", arch="sm_90", compute_units=14, memory_bytes=10 << 30, flags={"tma": True})


@pytest.mark.parametrize("form", ["json", "toml"])
def test_round_trip(form):
    text = getattr(SLICE, f"to_{form}")()
    again = getattr(DeviceProfile, f"from_{form}")(text)
    assert again == SLICE
    assert hash(again) == hash(SLICE)
    assert again.compute_units == 14
    assert again.has("tma")


def test_pickle_keeps_the_profile():
    assert pickle.loads(pickle.dumps(SLICE)) == SLICE


def test_unknown_facts_carry_a_reason_and_cannot_be_changed():
    assert SLICE.unknown["l2_bytes"] == "no source reported it"
    with pytest.raises(TypeError):
        SLICE.unknown["l2_bytes"] = "because"


def test_digest_ignores_which_card_it_is_but_not_what_it_is():
    assert SLICE.digest() == SLICE.replace(uuid="GPU-1", pci_bus_id="0000:01:00.0").digest()
    assert SLICE.digest() != SLICE.replace(compute_units=132).digest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"compute_unit": 3}', "no field 'compute_unit'"),
        ('{"compute_units": 0}', "must be a positive integer"),
        ('{"arch": 90}', "must be a string"),
        ("[1]", "not a JSON table"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_profile_is_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        DeviceProfile.from_json(text)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_file_that_is_no_text_is_refused(suffix, tmp_path):
    (tmp_path / f"device{suffix}").write_bytes(b"\xff\x00")
    with pytest.raises(ArgumentError, match="cannot be read: it is not UTF-8"):
        DeviceProfile.from_file(tmp_path / f"device{suffix}")


def test_cpu_facts_come_from_the_machine():
    profile = device_profile("cpu")
    assert (profile.vendor, profile.device_type) == ("cpu", "cpu")
    assert profile.compute_units >= 1
    assert profile.memory_bytes > 0


def test_cpu_is_a_name_for_this_machines(monkeypatch):
    """As it is, whatever describes it for the time being; and in the environment it describes every CPU."""
    plain = device_profile("cpu")
    with override_profile(DeviceProfile(vendor="cpu", device_type="cpu", compute_units=3)):
        assert device_profile("cpu").compute_units == 3
        assert load_profile("cpu") == plain
    monkeypatch.setenv("TCPORT_DEVICE_PROFILE", "cpu")
    assert device_profile() == device_profile("cpu") == plain


def test_override_speaks_for_its_own_type_only():
    with override_profile(SLICE):
        assert device_profile() == SLICE
        assert device_profile("cuda:1") == SLICE
        assert device_profile(torch.device("cpu")).vendor == "cpu"
    assert device_profile("cpu").vendor == "cpu"


def test_set_profile_holds_until_taken_back():
    set_profile(SLICE)
    try:
        assert device_profile("cuda") == SLICE
    finally:
        set_profile(None, "cuda")
    assert device_profile("cuda") != SLICE


def test_environment_names_a_file(tmp_path, monkeypatch):
    path = tmp_path / "slice.toml"
    path.write_text(SLICE.to_toml())
    monkeypatch.setenv("TCPORT_DEVICE_PROFILE", str(path))
    assert device_profile("cuda").compute_units == 14
    monkeypatch.setenv("TCPORT_DEVICE_PROFILE", str(tmp_path / "missing.json"))
    with pytest.raises(ArgumentError, match="cannot be read"):
        device_profile("cuda")
