"""Debug mode: what it finds before anything is launched, what it leaves alone, and that it is off by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tcport
from tcport import debug
from tcport.errors import MetadataError
from tcport.kernels import reference

PAGES, PAGE = 6, 4


def call(**changes: Any) -> dict[str, Any]:
    """A decode of lengths 5 and 8: two pages each."""
    arguments = {
        "query": torch.randn(2, 4, 8),
        "k_cache": torch.randn(PAGES, PAGE, 2, 8),
        "v_cache": torch.randn(PAGES, PAGE, 2, 8),
        "block_table": torch.tensor([[3, 1, 99], [0, 5, -7]]),
        "seq_lens": torch.tensor([5, 8]),
    }
    return {**arguments, **changes}


def test_it_is_off_and_garbage_past_the_length_is_no_fault() -> None:
    assert not debug.is_on()
    want, _ = reference.paged_attention(**call())
    torch.manual_seed(0)
    arguments = call()
    want, _ = reference.paged_attention(**arguments)
    with tcport.debug_mode():
        assert debug.is_on()
        torch.testing.assert_close(tcport.paged_attention(**arguments), want)
    assert not debug.is_on()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_table": torch.tensor([[3, 6, 0], [0, 5, 0]])}, r"block_table\[0, 1\] is 6; allowed is 0 to 5"),
        ({"block_table": torch.tensor([[3, 1, 0], [-1, 5, 0]])}, r"block_table\[1, 0\] is -1"),
        ({"seq_lens": torch.tensor([5, 13])}, r"seq_lens\[1\] is 13; allowed is 0 to 12"),
        ({"seq_lens": torch.tensor([-1, 8])}, r"seq_lens\[0\] is -1"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 1])}, r"cu_seqlens_q\[2\] is 1; allowed is 0 at first, then rising"),
        ({"cu_seqlens_q": torch.tensor([1, 1, 2])}, r"cu_seqlens_q\[0\] is 1"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 3])}, r"cu_seqlens_q\[2\] is 3.*up to 2"),
    ],
)
def test_a_value_no_kernel_may_follow_is_named(changes: dict[str, Tensor], said: str) -> None:
    with tcport.debug_mode(), pytest.raises(MetadataError, match=said):
        tcport.paged_attention(**call(**changes))


@pytest.mark.parametrize("option", [{"window": 4}, {"chunk": 4}])
def test_pages_recycled_before_a_window_or_chunk_may_hold_anything(option: dict[str, int]) -> None:
    recycled = call(block_table=torch.tensor([[3, 1, 99], [99, 5, -7]]), seq_lens=torch.tensor([4, 8]), **option)
    with tcport.debug_mode():
        result = tcport.paged_attention(**recycled)
    recycled["block_table"][1, 0] = 2
    torch.testing.assert_close(result, reference.paged_attention(**recycled)[0])


@pytest.mark.parametrize(
    ("slots", "said"),
    [([0, 24], r"slot_mapping\[1\] is 24; allowed is up to 23"), ([7, 7], r"slot_mapping\[1\] is 7.*no earlier token")],
)
def test_slots_out_of_range_or_taken_twice_are_named_and_nothing_is_written(slots: list[int], said: str) -> None:
    arguments = call()
    before = arguments["k_cache"].clone()
    key = torch.randn(2, 2, 8)
    with tcport.debug_mode(), pytest.raises(MetadataError, match=said):
        tcport.kv_write(key, key, arguments["k_cache"], arguments["v_cache"], torch.tensor(slots))
    assert torch.equal(arguments["k_cache"], before)
    with tcport.debug_mode():
        tcport.kv_write(key, key, arguments["k_cache"], arguments["v_cache"], torch.tensor([-1, -1]))
    assert torch.equal(arguments["k_cache"], before)


def test_scratch_memory_is_poisoned_within_and_as_before_after() -> None:
    with debug.poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty(3, dtype=torch.int32).tolist() == [2**31 - 1] * 3
    assert not torch.are_deterministic_algorithms_enabled()


def test_compiled_code_is_checked_when_the_option_asks() -> None:
    arguments = call(block_table=torch.tensor([[3, 6, 0], [0, 5, 0]]))
    compiled = torch.compile(tcport.paged_attention, backend="tcport", options={"debug": True})
    with pytest.raises(MetadataError, match=r"block_table\[0, 1\] is 6"):
        compiled(**arguments)
    arguments["block_table"][0, 1] = 2
    torch.testing.assert_close(compiled(**arguments), reference.paged_attention(**arguments)[0])
