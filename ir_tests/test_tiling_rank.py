"""The optimizer's first promises: legal tiles, typed refusals, split counts that stay symbolic."""

import dataclasses

import pytest
import sympy

from tcport.device import DeviceProfile
from tcport.errors import ArgumentError, NoTileError
from tcport.ir import BATCH, AttentionSpec, KVLayout
from tcport.tiling import rank_tiles

H200 = DeviceProfile(
    vendor="nvidia",
    arch="sm_90",
    compute_units=132,
    warp_width=32,
    max_threads_per_cta=1024,
    max_threads_per_unit=2048,
    registers_per_unit=65536,
    max_registers_per_thread=255,
    shared_per_cta=49152,
    shared_per_cta_optin=232448,
    shared_per_unit=233472,
)


def decode_spec(**changes) -> AttentionSpec:
    layout = KVLayout(16, 16 * 8 * 128, 8 * 128, 128, 1)
    spec = AttentionSpec("decode", 64, 64, 8192, 32, 8, 128, 128, "bfloat16", "bfloat16", layout, layout)
    return dataclasses.replace(spec, **changes)


def test_full_batch_is_not_split_and_single_sequence_is():
    assert rank_tiles(decode_spec(), H200).configs[0].num_splits == 1
    # One sequence has 8 KV heads: from one to two CTAs on each of 132 units.
    splits = rank_tiles(decode_spec(num_seqs=1, num_tokens=1), H200).configs[0].num_splits
    assert 132 // 8 <= splits <= 2 * 132 // 8


def test_splits_stay_an_expression_in_the_batch():
    batch = sympy.Symbol("s0", positive=True, integer=True)
    config = rank_tiles(decode_spec(num_seqs=batch, num_tokens=batch), H200).configs[0]
    assert config.num_splits.free_symbols == {BATCH}
    # About two CTAs on each of 132 units over 8 KV heads; from 33 sequences on there is work enough.
    assert config.splits(1) == 33
    assert config.splits(4) in (8, 9)
    assert [config.splits(b) for b in (33, 64, 4096)] == [1, 1, 1]


def test_a_device_too_small_for_any_tile_gets_the_typed_refusal():
    with pytest.raises(NoTileError, match="shared memory of a CTA"):
        rank_tiles(decode_spec(head_dim_qk=512, head_dim_v=512), H200.replace(shared_per_cta_optin=4096))


def test_impossible_spec_is_refused_by_name():
    with pytest.raises(ArgumentError, match="7 query heads and 2 KV heads"):
        rank_tiles(decode_spec(num_q_heads=7, num_kv_heads=2), H200)
