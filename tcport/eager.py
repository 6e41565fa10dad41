"""What tcport's operators run when they are called outside compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tcport import chain, checks, debug, remembered
from tcport.fused_ops import check_write_and_attend
from tcport.lowering.operators import KV_WRITE, PAGED_ATTENTION, WRITE_AND_ATTEND
from tcport.operator_library import LIBRARY, define_twin


def _paged_attention(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    chosen, key = remembered.recall("paged_attention", args, options, args[1], args[2])
    if chosen is not None:
        return chain.walk(chosen, PAGED_ATTENTION.call(*args, **options))
    checks.check_paged_attention(*args, **options)
    call = PAGED_ATTENTION.call(*args, **options)
    if debug.is_on():
        debug.check_attention(call)
        with debug.poisoned():
            return chain.run(PAGED_ATTENTION, call)
    chosen = chain.chosen(PAGED_ATTENTION, call)
    result = chain.walk(chosen, call)
    remembered.keep(key, chosen)
    return result


def _on_terms(*args: Any, kernels: Sequence[str] | None, strict: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """What a kernel of compiled code hands on, under the options that the code was compiled with."""
    checks.check_paged_attention(*args, **options)
    call = PAGED_ATTENTION.call(*args, **options)
    return chain.run(PAGED_ATTENTION, call, kernel=tuple(kernels or ()) or None, strict=strict)


def _kv_write(*args: Any, **options: Any) -> None:
    known, key = remembered.recall("kv_write", args, options, args[2], args[3])
    if known is None:
        checks.check_kv_write(*args, **options)
    call = KV_WRITE.call(*args, **options)
    if debug.is_on():
        debug.check_write(call)
    with torch.no_grad():
        chosen = known or chain.chosen(KV_WRITE, call)
        chain.walk(chosen, call)
    if known is None:
        remembered.keep(key, chosen)
    _count_write(call.k_cache, call.v_cache)


def _write_and_attend(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    check_write_and_attend(*args, **options)
    call = WRITE_AND_ATTEND.call(*args, **options)
    chain.run(KV_WRITE, call.write)
    _count_write(call.write.k_cache, call.write.v_cache)
    return chain.run(PAGED_ATTENTION, call.attend)


def _count_write(*caches: Tensor) -> None:
    """Tell autograd of a write: kernels go by pointers, and what was saved for a backward would pass as unchanged."""
    for cache in caches:
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)


LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
define_twin("paged_attention_on_terms", "paged_attention", _on_terms, more="str[]? kernels, bool strict")
LIBRARY.impl("kv_write", _kv_write, "CompositeExplicitAutograd")
LIBRARY.impl("write_and_attend", _write_and_attend, "CompositeExplicitAutograd")
