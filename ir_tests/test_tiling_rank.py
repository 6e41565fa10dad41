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
from tcport.ir import TOKENS, AttentionSpec
from tcport.kernels.call import WriteCall
from tcport.kernels.offline import record
from tcport.lowering.registry import select
from tcport.lowering.spec import WriteSpec
from tcport.tiling import TileLayoutOptimizer, rank_tiles, rank_write_tiles
from tcport.tiling.plan import plain_spec
from tcport.tiling.problem import padded, split_head_dim

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
