"""The optimizer's promises: legal tiles, typed refusals, split counts that stay symbolic, plans that fit the device."""

import dataclasses
import os
import subprocess
import sys

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcport.device import DeviceProfile, catalogue, catalogue_profile
from tcport.errors import ArgumentError, NoTileError
from tcport.ir import BATCH, TOKENS, AttentionSpec, TileConfig
from tcport.kernels.call import WriteCall
from tcport.kernels.offline import record
from tcport.lowering.registry import select
from tcport.lowering.spec import WriteSpec, kind_of, opened
from tcport.tiling import TileLayoutOptimizer, rank_tiles, rank_write_tiles
from tcport.tiling.plan import plain_spec
from tcport.tiling.problem import padded, problem_of, split_head_dim
from tcport.tiling.splits import busy_ctas, part_count, split_count

H200 = catalogue_profile("h200")
SLICE = H200.replace(compute_units=14, memory_bytes=10 << 30)


def decode_spec(**changes) -> AttentionSpec:
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "dim_qk": 128, "dim_v": 128}
    sizes = {"page": 16, "batch": 64, "context": 8192, "tokens": None}
    plain = heads | sizes | {"dtype": "bfloat16", "kv_dtype": "bfloat16", "latent": False}
    plain |= {name: changes.pop(name) for name in plain.keys() & changes.keys()}
    return dataclasses.replace(plain_spec(**plain), **changes)


def shared_need(config, spec) -> int:
    """Bytes of the K and V buffers and the Q tile, counted by hand for ``mma.sync`` and 16-bit caches."""
    dim_qk = sum(split_head_dim(spec.head_dim_qk))
    pair = config.block_n * (dim_qk + padded(spec.head_dim_v)) * 2
    return max(config.num_stages - 1, 0) * pair + config.block_m * dim_qk * 2


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


@pytest.mark.parametrize("tokens", [None, 512])
def test_batch_invariance_makes_one_plan_for_every_batch(tokens):
    plans = {
        rank_tiles(decode_spec(batch=b, context=c, tokens=tokens and tokens * b, batch_invariant=True), H200).configs
        for b, c in ((1, 128), (7, 8192), (256, 32768))
    }
    assert len(plans) == 1
    assert all(isinstance(config.num_splits, int) for config in plans.pop())


@pytest.mark.parametrize("kib", [64, 99, 163, 227])
@pytest.mark.parametrize("dim", [128, 192, 256, 320, 512])
@pytest.mark.parametrize("page", [16, 64, 256, 1056])
def test_tiles_fit_whatever_the_limit_the_head_dim_and_the_page(kib, dim, page):
    profile = catalogue_profile("a100").replace(shared_per_cta_optin=kib * 1024, shared_per_unit=(kib + 1) * 1024)
    for tokens in (None, 4096):
        spec = decode_spec(num_q_heads=64, num_kv_heads=8, dim_qk=dim, dim_v=dim, page=page, tokens=tokens)
        ranking = rank_tiles(spec, profile)
        assert all(shared_need(config, spec) <= kib * 1024 for config in ranking.configs)
        assert max(config.block_n for config in ranking.configs) <= 128
        assert ranking.configs == rank_tiles(decode_spec(
            num_q_heads=64, num_kv_heads=8, dim_qk=dim, dim_v=dim, page=16, tokens=tokens
        ), profile).configs  # fmt: skip


def test_small_and_large_devices_get_visibly_different_plans():
    limits = {
        kib: rank_tiles(
            decode_spec(dim_qk=256, dim_v=256, tokens=4096, batch=1, context=4096),
            H200.replace(shared_per_cta_optin=kib * 1024, shared_per_unit=(kib + 1) * 1024),
        ).configs[:2]
        for kib in (64, 99, 163, 227)
    }
    assert len(set(limits.values())) == 4  # the first choice and what stands behind it
    one = decode_spec(batch=1)
    assert 4 * rank_tiles(one, SLICE).configs[0].num_splits <= rank_tiles(one, H200).configs[0].num_splits


PLAN_EVERYWHERE = """
from tcport.device import catalogue, catalogue_profile
from tcport.tiling import rank_tiles
from tcport.tiling.plan import plain_spec
spec = plain_spec(num_q_heads=28, num_kv_heads=4, dim_qk=80, dim_v=80, page=16, batch=8, context=5000, tokens=700,
                  dtype="float16", kv_dtype="float8_e4m3fn")
for name in catalogue():
    print(name, rank_tiles(spec, catalogue_profile(name)))
"""


def test_two_processes_make_the_same_plan():
    def run(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PLAN_EVERYWHERE]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    first = run("1")
    assert first.count("Ranking(") == len(catalogue())
    assert run("2") == first


def test_latent_attention_reads_its_keys_once_and_fits():
    spec = decode_spec(num_q_heads=128, num_kv_heads=1, dim_qk=576, dim_v=512, latent=True)
    with pytest.raises(NoTileError):  # in fp32, the T4's only products, the smallest tile compiles to 69632 bytes
        rank_tiles(spec, catalogue_profile("t4"))
    for name in ("rtx4090", "a100", "h200", "mi300x"):
        ranking = rank_tiles(spec, catalogue_profile(name))
        assert ranking.configs
        # One 576-wide tile serves as K and V: at 16 bits, 1152 bytes for each key and buffer.
        limit = catalogue_profile(name).shared_per_cta_optin
        assert all(c.block_n * 1152 * max(1, c.num_stages - 1) <= limit for c in ranking.configs)


def test_more_pressure_than_registers_is_said_and_still_planned():
    ranking = rank_tiles(decode_spec(dim_qk=512, dim_v=512), catalogue_profile("rx7900xtx"))
    assert ranking.configs
    assert "spill" in ranking.notes[-1]


def test_unknown_facts_are_assumed_smallest_and_named():
    ranking = rank_tiles(decode_spec(), DeviceProfile(vendor="nvidia"))
    assert any("shared_per_cta_optin is unknown" in note and "49152" in note for note in ranking.notes)
    assert all(shared_need(config, decode_spec()) <= 49152 for config in ranking.configs)


def test_the_explanation_holds_expression_numbers_and_limit():
    optimizer = TileLayoutOptimizer(decode_spec(), H200)
    lines = optimizer.explain(optimizer.rank().configs[0])
    assert lines[0].startswith("shared memory of a CTA = ")
    assert "block_n*kv_bytes" in lines[0]
    assert "dim_qk=128" in lines[0]
    assert lines[0].endswith("fits the limit of 232448")
    assert lines[-1].startswith("t_call = ")


def test_a_device_too_small_for_any_tile_gets_the_typed_refusal():
    with pytest.raises(NoTileError, match="shared memory of a CTA"):
        rank_tiles(decode_spec(dim_qk=512, dim_v=512), H200.replace(shared_per_cta_optin=4096))


def test_impossible_spec_is_refused_by_name():
    with pytest.raises(ArgumentError, match="7 query heads and 2 KV heads"):
        rank_tiles(decode_spec(num_q_heads=7, num_kv_heads=2), H200)


def write_spec(**changes) -> WriteSpec:
    spec = decode_spec()
    layouts = spec.k_layout, spec.v_layout
    return dataclasses.replace(WriteSpec(8192, 8, 128, 128, "bfloat16", "bfloat16", *layouts, False), **changes)


def test_writes_have_a_tile_that_keeps_every_thread_busy():
    """A row of 128 in 16 bits is 256 bytes: 16 threads move it at once, and each shall move two pieces."""
    for tokens in (TOKENS, 8192, 64):
        best = rank_write_tiles(write_spec(num_tokens=tokens), H200).configs[0]
        assert best.block_n == 128
        assert best.block_m * 16 == 2 * best.num_warps * 32
    # 256 tokens of 8 heads, and 64: a program for at least three quarters of 132 units.
    assert str(rank_write_tiles(write_spec(num_tokens=TOKENS), H200).configs[0]) == "16x128 w4 st1"
    assert str(rank_write_tiles(write_spec(num_tokens=64), H200).configs[0]) == "4x128 w1 st1"
    assert str(rank_write_tiles(write_spec(num_tokens=64), SLICE).configs[0]) == "32x128 w8 st1"
    assert rank_write_tiles(write_spec(head_dim_qk=576, head_dim_v=512), H200).configs[0].block_n == 1024


def test_a_device_without_room_for_a_warp_writes_by_other_means():
    tiny = H200.replace(max_threads_per_cta=16)
    with pytest.raises(NoTileError, match="threads of a CTA: 32 exceeds the limit of 16"):
        rank_write_tiles(write_spec(), tiny)
    chain = select("kv_write", write_spec(), tiny)
    assert [link.kernel for link in chain.candidates] == ["torch_write"]
    assert "threads of a CTA" in {r.kernel: r.reason for r in chain.rejections}["triton_write"]


def test_the_chain_writes_with_the_ranked_tile():
    first = select("kv_write", write_spec(num_tokens=64), H200).candidates[0]
    assert str(first) == "triton_write [tuned] 4x128 w1 st1"
    caches = [torch.empty(16, 16, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    new = [torch.empty(64, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    call = WriteCall(*new, *caches, torch.empty(64, dtype=torch.int64, device="meta"))
    (launch,) = record(lambda launch: first.run(call, launch))
    assert launch.grid == (64 * 8 // 4,)
    assert (launch.arguments["BLOCK_M"], launch.options["num_warps"]) == (4, 1)


counts = st.none() | st.integers(1, 300)
profiles = st.builds(
    DeviceProfile,
    vendor=st.sampled_from(["nvidia", "amd", "intel", "cpu", "unknown"]),
    compute_units=counts,
    warp_width=st.sampled_from([None, 1, 8, 16, 32, 64]),
    max_threads_per_cta=st.sampled_from([None, 1, 64, 256, 1024]),
    max_threads_per_unit=st.sampled_from([None, 1, 1024, 2048]),
    registers_per_unit=st.sampled_from([None, 1, 8192, 65536, 131072]),
    max_registers_per_thread=st.sampled_from([None, 1, 64, 255, 512]),
    shared_per_cta=st.sampled_from([None, 1024, 49152]),
    shared_per_cta_optin=st.none() | st.integers(1, 256 * 1024),
    shared_per_unit=st.none() | st.integers(1, 512 * 1024),
    memory_bandwidth=st.sampled_from([None, 1e9, 4.8e12]),
    clock_hz=st.sampled_from([None, 1e8, 2e9]),
    matrix_flops=st.sampled_from([None, 1e12, 1e15]),
    l2_bytes=st.sampled_from([None, 1, 1 << 20]),
    mma_atom=st.sampled_from([None, "none", "mma.sync", "wgmma", "tcgen05", "mfma", "wmma", "dpas"]),
    async_copy=st.sampled_from([None, "none", "cp.async", "tma"]),
    flags=st.dictionaries(st.sampled_from(["bf16", "fp8"]), st.booleans()),
)
symbols = st.sampled_from([sympy.Symbol("s0", integer=True), sympy.Symbol("s1", integer=True) * 16])
sizes = st.integers(0, 1 << 20) | symbols
dtypes = ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "torch.bfloat16"]
kv_heads = st.integers(1, 64)
specs = st.builds(
    lambda heads, group, dtype, kv_dtype, page, dims, form, latent, **rest: dataclasses.replace(
        decode_spec(
            num_q_heads=heads * group, num_kv_heads=heads, dim_qk=dims[0], dim_v=dims[1], page=page, dtype=dtype,
            kv_dtype=kv_dtype, tokens=None if form == "decode" else 64, latent=latent,
        ),
        **rest,
    ),
    heads=kv_heads, group=st.integers(1, 130), dtype=st.sampled_from(dtypes[:3]), kv_dtype=st.sampled_from(dtypes),
    page=st.integers(1, 2048), dims=st.tuples(st.integers(1, 600), st.integers(1, 600)),
    form=st.sampled_from(["decode", "varlen"]), latent=st.booleans(), num_seqs=sizes, num_tokens=sizes,
    max_context=sizes, num_splits=st.none() | st.integers(1, 200), batch_invariant=st.booleans(), mask=st.booleans(),
)  # fmt: skip


@settings(max_examples=200)
@given(specs, profiles)
def test_no_profile_and_no_spec_makes_an_illegal_tile_or_an_untyped_error(spec, profile):
    try:
        ranking = rank_tiles(spec, profile)
    except (NoTileError, ArgumentError):
        return
    assert ranking.configs
    shared = profile.shared_per_cta_optin or profile.shared_per_cta or 48 * 1024
    warp_width = profile.warp_width or (64 if profile.vendor == "amd" else 32)
    for config in ranking.configs:
        for size in (config.block_m, config.block_n, config.num_warps):
            assert size & (size - 1) == 0
        assert config.block_m >= 16
        assert config.splits(1, 1, 1) >= 1
        assert config.splits(100, 300, 4096) >= 1
        if profile.vendor == "cpu":
            continue
        assert config.num_warps * warp_width <= (profile.max_threads_per_cta or 256)
        widest = max(sum(split_head_dim(spec.head_dim_qk)), 0 if spec.v_is_view_of_k else padded(spec.head_dim_v))
        assert config.block_n * widest <= shared


@pytest.mark.parametrize("device", ["h100", "h200", "b200"])
@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "float8_e4m3fn"}, {"dim_qk": 96, "dim_v": 96}, {"dim_qk": 256}])
def test_no_two_warpgroups_share_rows(device: str, changes: dict) -> None:
    """Seen on an H200 with triton 3.6: 64 rows under 8 warps give wrong results and illegal accesses."""
    for sizes in ({"tokens": 22, "batch": 4, "context": 66}, {"tokens": 4096, "batch": 1}, {"num_q_heads": 512}):
        configs = rank_tiles(decode_spec(**sizes, **changes), catalogue_profile(device)).configs
        assert all(c.block_m < 64 or c.num_warps < 8 or c.block_m >= 128 for c in configs)


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_short_warpgroup_products_have_few_keys(device: str) -> None:
    """Seen on an H200 with triton 3.6: V of 8 to 32 columns is wrong from 64 keys on; 64 columns are right."""
    for dim_v in (8, 16, 32, 48, 64):
        for sizes in ({"tokens": 22, "batch": 4, "context": 66}, {"tokens": 4096, "batch": 1}):
            configs = rank_tiles(decode_spec(**sizes, dim_qk=80, dim_v=dim_v), catalogue_profile(device)).configs
            products = [c for c in configs if c.block_m >= 64 and c.num_warps % 4 == 0]
            assert {c.block_n for c in products} & {64, 128} == (set() if dim_v <= 32 else {64, 128})
