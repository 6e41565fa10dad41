"""The catalogue: every device of the list is there, every value has a source, nothing is invented."""

import pytest

from tcport.device import FACTS, catalogue, catalogue_profile, device_profile, override_profile
from tcport.errors import ArgumentError

# Shared memory limit, units and target of each device, from the sources the catalogue names.
EXPECTED = {
    "a100": ("sm_80", 108, 163 * 1024),
    "h100": ("sm_90", 132, 227 * 1024),
    "h200": ("sm_90", 132, 227 * 1024),
    "b200": ("sm_100", 148, 227 * 1024),
    "l40s": ("sm_89", 142, 99 * 1024),
    "rtx4060_laptop": ("sm_89", 24, 99 * 1024),
    "rtx4090": ("sm_89", 128, 99 * 1024),
    "rtx_pro_6000": ("sm_120", 188, 99 * 1024),
    "t4": ("sm_75", 40, 64 * 1024),
    "mi250x": ("gfx90a", 110, 64 * 1024),
    "mi300x": ("gfx942", 304, 64 * 1024),
    "mi355x": ("gfx950", 256, 160 * 1024),
    "rx7900xtx": ("gfx1100", 48, 64 * 1024),
    "gfx1151": ("gfx1151", 20, 64 * 1024),
    "rx9070xt": ("gfx1201", 32, 64 * 1024),
    "max1550": ("pvc", 64, 128 * 1024),
    "b580": ("bmg", 20, 128 * 1024),
}


def test_the_list_is_complete():
    assert set(catalogue()) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_values_and_sources(name):
    profile = catalogue_profile(name)
    assert (profile.arch, profile.compute_units, profile.shared_per_cta_optin) == EXPECTED[name]
    for fact in FACTS:
        known = getattr(profile, fact) is not None
        assert known == (fact in profile.source), fact
        assert known != (fact in profile.unknown), fact
    measured = {f for f in FACTS if f in profile.source} - {"arch", "name", "integrated"}
    allowed = ("https://", "instruction set of the target")
    assert all(any(a in profile.source[fact] for a in allowed) for fact in measured)


def test_what_has_no_source_stays_unknown():
    laptop = catalogue_profile("rtx4060_laptop")
    assert laptop.clock_hz is None
    assert laptop.matrix_flops is None
    assert "no public source" in laptop.unknown["clock_hz"]
    assert catalogue_profile("gfx1151").memory_bytes is None


def test_names_are_forgiving_and_misses_name_neighbours():
    assert catalogue_profile("RTX PRO 6000") == catalogue_profile("rtx_pro_6000")
    with pytest.raises(ArgumentError, match="mi300x"):
        catalogue_profile("mi300")


def test_a_catalogue_name_is_an_override(monkeypatch):
    monkeypatch.setenv("TCPORT_DEVICE_PROFILE", "b580")
    assert device_profile("xpu").arch == "bmg"
    with override_profile("t4"):
        assert device_profile("cuda:3").arch == "sm_75"
