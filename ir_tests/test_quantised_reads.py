"""How decode reads 8-bit caches: in pairs of dims where they lie so, and multiplied in fp16 where that is exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_kernels import BF16, DECODE, DECODE_TILE, FP16, FP32, TOLERANCE, attend, of_any_size
from paged_cases import FP8, Case, build, check

from tcport.kernels.call import AttentionCall
from tcport.kernels.triton_arguments import fits_fp16, reads_pairs

QUANTISED = dataclasses.replace(DECODE, dims=(64, 96), dtype=BF16, kv_dtype=torch.float8_e4m3fn)
MLA = dataclasses.replace(QUANTISED, layout="mla", heads=(16, 1), dims=(576, 512))


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({}, True),
        ({"kv_dtype": torch.int8, "scales": "tensor"}, True),
        ({"dtype": FP16}, True),
        ({"dims": (64, 80)}, True),
        ({"layout": "packed"}, True),
        ({"dims": (64, 64)}, False),  # too few for a matrix unit
        ({"dims": (64, 81)}, False),  # the last dim has no other
        ({"dtype": FP32}, False),
        ({"kv_dtype": BF16}, False),
        ({"q_lens": (2, 0, 3, 1, 1, 1)}, False),
    ],
    ids=str,
)
def test_values_are_read_in_pairs(changes: dict, pairs: bool) -> None:
    assert reads_pairs(build(dataclasses.replace(QUANTISED, **changes))) == pairs


def test_values_that_are_keys_are_read_once() -> None:
    assert not reads_pairs(build(MLA))


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"kv_dtype": torch.int8, "scales": "head"}, True),
        ({"q_lens": (2, 0, 3, 1, 1, 1)}, True),
        ({"scales": "token"}, False),  # may be as small as it likes, and multiplies the weights
        ({"dtype": FP16}, False),  # is fp16 as it stands
        ({"kv_dtype": BF16}, False),
        ({"kv_dtype": torch.float8_e5m2fnuz}, False),  # its smallest numbers are none of fp16's
    ],
    ids=str,
)
def test_products_are_taken_in_fp16(changes: dict, fits: bool) -> None:
    assert fits_fp16(build(dataclasses.replace(QUANTISED, **changes))) == fits


def test_values_at_an_odd_byte_are_not_read_in_pairs() -> None:
    assert not reads_pairs(_at_an_odd_byte(build(QUANTISED)))


@pytest.mark.gpu
def test_values_at_an_odd_byte() -> None:
    call = _at_an_odd_byte(build(QUANTISED, "cuda"))
    check(call, *attend(call, DECODE_TILE), TOLERANCE[BF16])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [*FP8, torch.int8], ids=str)
def test_queries_of_any_size(kv_dtype: torch.dtype) -> None:
    """Products in fp16, whose largest number is 65504, with queries that it cannot hold, or would round to 0."""
    scales = "tensor" if kv_dtype == torch.int8 else "none"
    call = build(dataclasses.replace(QUANTISED, kv_dtype=kv_dtype, scales=scales), "cuda")
    call = of_any_size(call)
    check(call, *attend(call, DECODE_TILE), TOLERANCE[BF16])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"window": 40}, {"mask": 50, "sinks": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("keys", [16, 32, 64, 128])
def test_lengths_at_the_edges_of_tiles(keys: int, options: dict) -> None:
    lens = tuple(sorted({1, 15, 16, 17, keys - 1, keys, keys + 1, 2 * keys + 1}))
    case = Case(lens, heads=(8, 2), dims=(128, 128), dtype=BF16, kv_dtype=torch.float8_e4m3fn, scales="head")
    for warps, splits in ((1, 1), (2, 3), (4, 1)):
        call = build(case.with_options(**options), "cuda")
        config = dataclasses.replace(DECODE_TILE, block_n=keys, num_warps=warps, num_splits=splits)
        check(call, *attend(call, config), TOLERANCE[BF16])


def _at_an_odd_byte(call: AttentionCall) -> AttentionCall:
    v = call.v_cache
    room = torch.zeros(v.numel() * 2 + 1, dtype=torch.uint8, device=v.device).view(v.dtype)[1:]
    moved = room[: v.numel()].view(v.shape)
    moved.view(torch.uint8).copy_(v.contiguous().view(torch.uint8))
    return dataclasses.replace(call, v_cache=moved)
