"""Debug mode: look at the values of tables, lengths and slots before a kernel trusts them, and poison scratch memory.

On with ``TCPORT_DEBUG=1`` or within :func:`debug_mode`. Off, it costs one test of a flag per eager call and nothing in
compiled code. On, every call waits for the device, and compiled graphs call the operators instead of inlining kernels.
Nothing can be read while a CUDA graph is captured; such calls are poisoned but not checked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from tcport.errors import MetadataError
from tcport.kernels.call import AttentionCall, WriteCall

_on = os.environ.get("TCPORT_DEBUG", "") not in ("", "0")


def is_on() -> bool:
    """Whether debug mode is on."""
    return _on


@contextlib.contextmanager
def debug_mode(on: bool = True) -> Iterator[None]:
    """Debug mode on (or off) within the block, for the whole process."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within the block, memory that torch hands out uninitialised holds NaN, or the largest value of its int dtype.

    A kernel that leaves an element of its result or scratch unwritten then shows, instead of finding old numbers there.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]


def check_attention(call: AttentionCall) -> None:
    """Look at the lengths, the query ranges, and every table entry that the call reads.

    Raises:
        MetadataError: names the first bad element, its value, and what is allowed.
    """
    if _capturing(call.query):
        return
    lens, table = call.seq_lens.long().cpu(), call.block_table.long().cpu()
    page_size, num_pages = int(call.k_cache.shape[1]), int(call.k_cache.shape[0])
    room = table.shape[1] * page_size
    _all("seq_lens", lens, (lens >= 0) & (lens <= room), f"0 to {room} (columns of block_table times the page size)")
    q_lens = torch.ones_like(lens)
    if call.cu_seqlens_q is not None:
        cu, tokens = call.cu_seqlens_q.long().cpu(), int(call.query.shape[0])
        rising = torch.cat([cu[:1] == 0, cu[1:] >= cu[:-1]])
        _all("cu_seqlens_q", cu, rising & (cu <= tokens), f"0 at first, then rising up to {tokens} (the tokens)")
        q_lens = cu.diff()

    first_query = lens - q_lens
    first_key = torch.zeros_like(lens)
    if call.window is not None:
        first_key = torch.maximum(first_key, first_query - call.window + 1)
    if call.chunk is not None:
        first_key = torch.maximum(first_key, first_query // call.chunk * call.chunk)
    column = torch.arange(table.shape[1])
    read = (column < (-(-lens // page_size))[:, None]) & (column >= (first_key // page_size)[:, None])
    read &= (q_lens > 0)[:, None]
    _all("block_table", table, ~read | ((table >= 0) & (table < num_pages)), f"0 to {num_pages - 1} (pages)")


def check_write(call: WriteCall) -> None:
    """Look at the slots of a write: none beyond the cache, none taken twice. Negative slots are padding.

    Raises:
        MetadataError: names the first bad element, its value, and what is allowed.
    """
    if _capturing(call.key):
        return
    slots = call.slot_mapping.long().cpu()
    num_slots = int(call.k_cache.shape[0]) * int(call.k_cache.shape[1])
    _all("slot_mapping", slots, slots < num_slots, f"up to {num_slots - 1} (slots), or negative for padding")
    order = torch.argsort(slots, stable=True)
    repeated = torch.zeros_like(slots, dtype=torch.bool)
    repeated[order[1:]] = (slots[order[1:]] == slots[order[:-1]]) & (slots[order[1:]] >= 0)
    _all("slot_mapping", slots, ~repeated, "a slot that no earlier token of the call writes")


def _all(name: str, values: Tensor, good: Tensor, allowed: str) -> None:
    if bool(good.all()):
        return
    where = (~good).nonzero()[0].tolist()
    raise MetadataError(
        f"{name}{where} is {int(values[tuple(where)])}; allowed is {allowed}.",
        "Nothing was read or written; look at what filled this tensor.",
    )


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
