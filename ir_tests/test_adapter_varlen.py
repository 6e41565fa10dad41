"""torch's own paged attention, whose kernel needs a GPU: the rewritten graph runs anywhere.

Before torch 2.13 ``varlen_attn`` takes no block table: there is no such spelling, and there are no such tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_harness import Adapted, adapt_only, problem
from torch import Tensor
from torch.nn.attention import varlen

from tcport.kernels import reference

PAGED = torch.ops.tcport.paged_attention.default
GIVEN = problem(tokens=4, dtype=torch.float32)
QUERY = GIVEN.q.transpose(1, 2).flatten(0, 1)
CU = torch.arange(4, dtype=torch.int32) * 4
LENS = GIVEN.lens.int()


def attend(**options: Any) -> Callable[..., Any]:
    def model(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, table: Tensor, lens: Tensor) -> Any:
        return varlen.varlen_attn(
            q, k, v, cu, None, 4, 40, enable_gqa=True, seqused_k=lens, block_table=table, **options
        )

    return model


def adapted(**options: Any) -> tuple[Adapted, Any]:
    with torch.no_grad():
        found = adapt_only(attend(**options), QUERY, GIVEN.k_cache, GIVEN.v_cache, CU, GIVEN.table, LENS)
    return found, found.result


if "block_table" in inspect.signature(varlen.varlen_attn).parameters:

    @pytest.mark.parametrize(
        ("window", "meaning"),
        [
            ((-1, -1), {"causal": False}),
            ((-1, 0), {"causal": True}),
            ((5, 0), {"causal": True, "window": 6}),
            ((5, -1), {"causal": False, "window": 6}),
        ],
    )
    def test_window(window: tuple[int, int], meaning: dict[str, Any]) -> None:
        found, result = adapted(window_size=window, scale=0.3)
        assert found.kinds == ["paged_attention:varlen"], found.report
        expected, _ = reference.paged_attention(
            QUERY, GIVEN.k_cache, GIVEN.v_cache, GIVEN.table, LENS, CU, scale=0.3, **meaning
        )
        torch.testing.assert_close(result, expected, rtol=0, atol=2e-5)

    def test_lse() -> None:
        found, (out, lse) = adapted(window_size=(-1, 0), return_aux=varlen.AuxRequest(lse=True))
        assert found.kinds == ["paged_attention:varlen"], found.report
        expected = reference.paged_attention(QUERY, GIVEN.k_cache, GIVEN.v_cache, GIVEN.table, LENS, CU)
        torch.testing.assert_close(out, expected[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(lse, expected[1].transpose(0, 1), rtol=0, atol=2e-5)

    def test_one_split_is_batch_invariant() -> None:
        found, _ = adapted(window_size=(-1, 0), num_splits=1)
        (node,) = found.calls(PAGED)
        assert node.kwargs == {"num_splits": 1, "batch_invariant": True}
