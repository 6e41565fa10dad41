"""How decode cuts the keys of a batch: splits and parts, by hand, and the tiles that are chosen with them."""

import dataclasses

import pytest
import sympy
from test_tiling_rank import H200, decode_spec

from tcport.ir import BATCH, TileConfig
from tcport.lowering.spec import kind_of, opened
from tcport.tiling import rank_tiles
from tcport.tiling.problem import problem_of
from tcport.tiling.splits import busy_ctas, part_count, split_count


def test_full_batch_is_not_split_and_single_sequence_is():
    assert rank_tiles(decode_spec(), H200).configs[0].num_splits == 1
    # One sequence has 8 KV heads: from one to two CTAs on each of 132 units.
    splits = rank_tiles(decode_spec(batch=1), H200).configs[0].num_splits
    assert 132 // 8 <= splits <= 2 * 132 // 8


def test_splits_stay_an_expression_in_the_batch():
    batch = sympy.Symbol("s0", positive=True, integer=True)
    config = rank_tiles(decode_spec(num_seqs=batch, num_tokens=batch), H200).configs[0]
    assert config.num_splits.free_symbols == {BATCH}
    # About two CTAs on each of 132 units over 8 KV heads; from 33 sequences on there is work enough.
    assert config.splits(1, 1, 8192) == 33
    assert config.splits(4, 4, 8192) in (8, 9)
    assert [config.splits(b, b, 8192) for b in (33, 64, 4096)] == [1, 1, 1]


def test_open_sizes_are_cut_as_known_ones_are():
    """By hand, for 8 KV heads on 132 units: about 264 CTAs, and no more than 8 splits and one for every 80 keys."""
    batch, tokens, context = (sympy.Symbol(name, positive=True, integer=True) for name in ("s0", "s1", "s2"))
    decode = rank_tiles(decode_spec(num_seqs=batch, num_tokens=batch, max_context=context), H200).configs[0]
    assert [decode.splits(1, 1, keys) for keys in (1, 127, 512, 2048, 65536)] == [1, 1, 8, 32, 33]
    assert decode.splits(8, 8, 65536) == 5
    # Blocks of 64 rows hold 16 tokens of 4 heads: drafts of a few tokens leave the device idle unless keys are cut.
    spec = decode_spec(tokens=4, num_seqs=batch, max_context=context)
    prefill = rank_tiles(dataclasses.replace(spec, num_tokens=tokens), H200).configs[0]
    assert (prefill.block_m, prefill.splits(1, 4, 4096), prefill.splits(1, 512, 16384)) == (64, 33, 1)
    assert prefill.splits(16, 64, 4096) == 2  # twice 128 blocks are resident at a time


@pytest.mark.parametrize(
    ("sequences", "keys", "splits"),
    [(1, 128, 1), (1, 192, 3), (8, 245, 1), (8, 246, 3), (16, 361, 1), (16, 362, 3), (32, 593, 1), (32, 594, 2)],
)
def test_what_is_merged_takes_longer_than_half_of_its_keys(sequences, keys, splits):
    """By hand: a merge is as long as 64 keys and 30 for each of 32 rows a sequence, on 132 units."""
    batch, context = (sympy.Symbol(name, positive=True, integer=True) for name in ("s0", "s1"))
    spec = decode_spec(num_seqs=batch, num_tokens=batch, max_context=context)
    assert rank_tiles(spec, H200).configs[0].splits(sequences, sequences, keys) == splits
    known = split_count(problem_of(decode_spec(batch=sequences, context=keys)), 16, 32, 132, 5, invariant=False)
    assert known == splits


def test_keys_of_one_split_leave_no_number_open():
    batch = sympy.Symbol("s0", positive=True, integer=True)
    spec = decode_spec(num_seqs=batch, num_tokens=batch, max_context=128)
    first = rank_tiles(spec, H200).configs[0]
    assert (first.block_n, first.num_splits) == (128, 1)


def test_small_decode_batches_are_planned_as_one_kind_and_all_others_as_another():
    small = {kind_of(decode_spec(batch=b, context=c)) for b, c in ((1, 16), (1, 128), (16, 16), (16, 128), (7, 48))}
    assert small == {decode_spec(batch=16, context=128)}
    others = {kind_of(decode_spec(batch=b, context=c)) for b, c in ((1, 144), (17, 16), (64, 8192))}
    assert others == {opened(decode_spec())}
    drafts = decode_spec(batch=4, context=64, tokens=16)
    assert kind_of(drafts) == opened(drafts)
    assert rank_tiles(small.pop(), H200).configs[0].uncut == TileConfig(16, 128, 4, 1)


@pytest.mark.parametrize(
    ("sequences", "resident", "parts"), [(2, 6, 25), (8, 6, 7), (16, 6, 4), (64, 6, 3), (64, 8, 2), (256, 6, 2)]
)
def test_parts_of_a_batch_fill_the_device_once_or_twice(sequences, resident, parts):
    """By hand, for 8 KV heads on 132 units: 396 CTAs or three parts each, within what is resident or twice that."""
    sizes = {"units": 132, "resident": resident, "busy": 396}
    assert part_count(problem_of(decode_spec(batch=sequences)), 16, 32, **sizes) == parts
    batch, context = (sympy.Symbol(name, positive=True, integer=True) for name in ("s0", "s1"))
    open_sizes = problem_of(decode_spec(num_seqs=batch, num_tokens=batch, max_context=context))
    tile = TileConfig(16, 32, 1, 3, parts=part_count(open_sizes, 16, 32, **sizes))
    assert tile.parts_each(sequences, sequences, 8192) == parts
    assert tile.parts_each(sequences, sequences, 256) == (2 if parts != 3 else 3)


@pytest.mark.parametrize(
    ("tile_kib", "warps", "stages", "bandwidth", "ctas"),
    [
        (16, 1, 3, 4.8e12, 396),  # for three warps on each unit; 395 for the memory
        (16, 2, 4, 4.8e12, 395),  # 2.7 us of the bandwidth, in CTAs with 32 KiB on their way
        (16, 1, 2, 4.8e12, 726),  # of 791, five and a half for each unit
        (32, 2, 3, 4.8e12, 198),
        (64, 4, 1, 4.8e12, 263),
        (16, 1, 3, 1e12, 396),
        (64, 8, 4, 1e12, 132),
    ],
)
def test_ctas_that_keep_the_memory_of_132_units_busy(tile_kib, warps, stages, bandwidth, ctas):
    assert busy_ctas(tile_kib * 1024, warps, stages, bandwidth, 132) == ctas


@pytest.mark.parametrize(("batch", "context"), [(16, 128), (1, 65536), (256, 512)])
def test_what_is_not_cut_by_lengths_has_no_parts(batch, context):
    """So that what is compiled to look at its footprint is what will be launched."""
    assert {tile.parts for tile in rank_tiles(decode_spec(batch=batch, context=context), H200).configs} == {0}


def test_wide_tiles_and_single_stages_are_for_sequences_that_stay_whole():
    """On an H200, 8 x 512 took 13.7 us with 16x128 w4 st1 in four splits, and 9.4 us with the best tile."""
    cut = rank_tiles(decode_spec(batch=8, context=4096), H200)
    assert all(tile.block_n <= 64 and tile.num_stages > 1 for tile in cut.configs)
    reasons = {why for _, why in cut.rejected}
    assert {
        "128 keys a tile are for sequences that stay whole",
        "one stage is for sequences that stay whole",
    } <= reasons
    whole = rank_tiles(decode_spec(batch=16, context=128), H200)
    assert whole.configs[0] == TileConfig(16, 128, 4, 1)


@pytest.mark.parametrize(
    ("sequences", "kv_dtype", "parts"), [(64, "float8_e4m3fn", 4), (64, "int8", 4), (40, "int8", 3)]
)
def test_parts_of_8_bit_keys_fill_the_device_twice_where_two_of_each_fill_it(sequences, kv_dtype, parts):
    """By hand: 9 x 132 CTAs are resident, 1188; 64 x 8 pairs have two each in them, and four in twice as many."""
    problem = problem_of(decode_spec(batch=sequences, kv_dtype=kv_dtype))
    assert part_count(problem, 16, 32, units=132, resident=9, busy=726) == parts


def test_a_tile_for_open_numbers_of_tokens_suits_drafts_too():
    """On an H200, 64 sequences of 8192 keys and 4 tokens took 504 us with 64 rows a tile, and 705 us with 128."""
    assert rank_tiles(opened(decode_spec(tokens=256)), H200).configs[0].block_m == 64


def test_open_numbers_of_tokens_at_256_dims_leave_no_warpgroup_alone_on_its_unit():
    """On an H200, in us: 64x32 w4 st3, of which one fits a unit, 340 for a prompt of 2048 and 168 for 16 drafts of 4.

    With two stages, of which two fit: 259 and 154. 128x32 w8 st3: 205 and 194.
    """
    first = rank_tiles(opened(decode_spec(dim_qk=256, dim_v=256, tokens=256)), H200).configs[0]
    assert str(first.uncut) in ("64x32 w4 st2", "128x32 w8 st3")


def test_among_tiles_of_equal_cost_one_without_splits_goes_first():
    """On an H200 16 drafts of 4 tokens on 4096 keys of 256 dims took 128 us with 16x64 w4 st3, and 179 us with the
    tile of equal cost 16x32 w2 st3 in three splits, which a merge of its own follows.
    """
    device = H200.replace(clock_hz=1.98e9, memory_bandwidth=4.917e12, matrix_flops=1.0705e15)  # as its driver says
    ranking = rank_tiles(decode_spec(dim_qk=256, dim_v=256, batch=16, context=4096, tokens=64), device)
    assert str(ranking.configs[0]) == "16x64 w4 st3"
    assert "16x32 w2 st3 splits 3" in map(str, ranking.configs[1:4])


def test_a_forced_number_of_splits_is_kept():
    forced = rank_tiles(decode_spec(num_splits=3), H200).configs
    assert {(config.num_splits, config.parts) for config in forced} == {(3, 0)}
    assert {config.parts for config in rank_tiles(decode_spec(batch_invariant=True), H200).configs} == {0}
    assert {config.parts for config in rank_tiles(decode_spec(tokens=64), H200).configs} == {0}
