"""Calls on a GPU that is not the current one: profile, kernel, launch and result all follow the tensor's device.

On a machine with one GPU the last device is the current one, and the tests hold there too.
"""

from __future__ import annotations

import pytest
import torch
from gpu_kernels import BF16, FP32, TOLERANCE
from paged_cases import Case, build, check
from test_backend_gpu import batch, decode, expected

import tcport
from tcport.device import device_profile
from tcport.kernels.call import AttentionCall

pytestmark = pytest.mark.gpu

CASES = {
    "decode": Case((37, 0, 300, 1), heads=(8, 2), dtype=FP32),
    "prefill": Case((37, 0, 300), (5, 0, 150), heads=(8, 2), dtype=FP32, uncovered=(2, 1)),
    "hopper": Case((700, 300), (700, 257), heads=(32, 8), dims=(128, 128), dtype=BF16),
}


def last_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.device_count() - 1)


def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    found = tcport.paged_attention(
        call.query, call.k_cache, call.v_cache, call.block_table, call.seq_lens, call.cu_seqlens_q, return_lse=True
    )
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("name", CASES)
def test_eager_calls_run_where_their_tensors_are(name: str) -> None:
    device = last_gpu()
    for place in (device, torch.device("cuda", 0), device):
        call = build(CASES[name], str(place))
        with torch.cuda.device(0):
            out, lse = attend(call)
            assert torch.cuda.current_device() == 0
        assert out.device == lse.device == place
        check(call, out, lse, TOLERANCE[call.query.dtype])


def test_one_compiled_model_serves_both() -> None:
    compiled = torch.compile(decode, backend="tcport", fullgraph=True)
    for place in (last_gpu(), torch.device("cuda", 0), last_gpu()):
        args = [a.to(place) for a in batch(5, FP32)]
        want, k_cache = expected(args)
        with torch.cuda.device(0):
            got = compiled(*args)
        assert got.device == place
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-4)
        assert torch.equal(args[3].cpu(), k_cache)


def test_the_profile_is_that_of_the_device_asked_for() -> None:
    for index in range(torch.cuda.device_count()):
        profile = device_profile(torch.device("cuda", index))
        properties = torch.cuda.get_device_properties(index)
        assert profile.name == properties.name
        assert profile.compute_units == properties.multi_processor_count
