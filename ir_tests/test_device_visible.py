"""Masks in every spelling: taken apart as their runtimes do, never a crash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcport.device.visible import MASKS, entry_of, masks, parse_mask, why_hidden

MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
OLD_MIG = "MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/2"


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("0", ("0",)),
        ("2, 0 ,1", ("2", "0", "1")),
        ("1gpu2,2ampere", ("1", "2")),
        (MIG, (MIG,)),
        (OLD_MIG, (OLD_MIG,)),
        (f"{MIG},{OLD_MIG}", (MIG, OLD_MIG)),
        ("GPU-5c89852c", ("GPU-5c89852c",)),
        ("GPU-5c,1", ("GPU-5c",)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("0,,1", ("0",)),
        ("0,1,0", ()),
        ("NoDevFiles", ()),
        ("GPU-", ()),
    ],
)
def test_cuda_spellings(text, entries):
    assert parse_mask("CUDA_VISIBLE_DEVICES", text).entries == entries


@pytest.mark.parametrize(
    ("text", "entries"), [("0.1,1", ("0.1", "1")), ("0,1.0", ("0", "1.0")), ("0.1.2.3", ()), ("x", ())]
)
def test_affinity_mask_names_tiles(text, entries):
    assert parse_mask("ZE_AFFINITY_MASK", text).entries == entries


def test_masks_apply_in_order_and_the_last_one_names_the_device():
    environ = {"ROCR_VISIBLE_DEVICES": "GPU-3b5f,GPU-77aa", "HIP_VISIBLE_DEVICES": "1"}
    assert [mask.variable for mask in masks("amd", environ)] == ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
    assert entry_of("amd", 0, environ) == "1"
    assert entry_of("amd", 1, environ) is None
    assert why_hidden("amd", 1, environ) == "HIP_VISIBLE_DEVICES='1' selects 1"
    assert why_hidden("nvidia", 0, environ) == ""


@given(st.sampled_from(sorted({name for names in MASKS.values() for name in names})), st.text(max_size=40))
def test_any_string_is_taken_apart(variable, text):
    mask = parse_mask(variable, text)
    assert len(set(mask.entries)) == len(mask.entries)
    assert mask.entries or mask.remark
