"""Case A4: offsets past 2**31 elements, in caches, queries and scales, on every path."""

from __future__ import annotations

import pytest
import torch
from attention_paths import COMPILED, EVERY_PATH, Path, slots_of
from torch import Tensor

from tcport.kernels import reference
from tcport.testing import Recipe, assert_close, build_batch


@pytest.fixture(params=EVERY_PATH)
def path(request: pytest.FixtureRequest) -> Path:
    """Every way to a result but the one that compiles for the CPU, which :func:`test_compiled` takes."""
    return request.param


class TestA4OffsetsPast32Bits:
    """Page id times page stride exceeds 2**31 elements: reading and writing far pages is as reading near ones.

    The cache is never touched but for a few pages, so the operating system never backs the rest with memory.
    """

    page, num_kv_heads, dim, num_pages = 64, 8, 256, 16386

    def test_far_pages_equal_near_pages(self, path: Path) -> None:
        shape = (self.num_pages, self.page, self.num_kv_heads, self.dim)
        cache = torch.empty(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert cache.stride(0) * (self.num_pages - 2) >= 2**31
        query = torch.randn(2, self.num_kv_heads, self.dim, dtype=torch.bfloat16)
        key = torch.randn(100, self.num_kv_heads, self.dim)
        lens = torch.tensor([100, 37], dtype=torch.int32)

        def run(first: int, second: int) -> tuple[Tensor, Tensor]:
            table = torch.tensor([[first, second]] * 2, dtype=torch.int32)
            path.write(key, key, cache, cache, slots_of(table[:1], [100], self.page).int())
            return path.attention(query=query, k_cache=cache, v_cache=cache, block_table=table, seq_lens=lens)

        near, far = run(0, 1), run(self.num_pages - 1, self.num_pages - 2)
        assert torch.equal(near[0], far[0])
        assert torch.equal(near[1], far[1])
        small = key.to(cache.dtype)[:, None]
        rows = torch.arange(100, dtype=torch.int32)[None].expand(2, 100)
        assert_close(far[0], reference.paged_attention(query, small, small, rows, lens)[0])

    @pytest.mark.parametrize("q_lens", [None, (1, 2)], ids=["decode", "varlen"])
    def test_far_queries_equal_near_queries(self, path: Path, q_lens: tuple[int, ...] | None) -> None:
        """Query tokens so far apart that the last is beyond 2**31 elements."""
        lens = (3, 40, 7) if q_lens is None else (3, 40)
        batch = build_batch(Recipe(lens=lens, q_lens=q_lens, dims=(64, 32), query_dtype=torch.float16))
        query = batch.arguments["query"]
        far = torch.empty(2**31 + 2**20, dtype=query.dtype).as_strided(query.shape, (2**30 + 64, *query.stride()[1:]))
        assert far.stride(0) * (len(query) - 1) > 2**31
        far.copy_(query)
        near_out, near_lse = path.attention(**batch.arguments)
        far_out, far_lse = path.attention(**{**batch.arguments, "query": far})
        batch.check(near_out, near_lse)
        assert torch.equal(near_out, far_out)
        assert torch.equal(near_lse, far_lse)

    def test_far_scales_equal_near_scales(self, path: Path) -> None:
        batch = build_batch(Recipe(lens=(40,), page=64, kv_dtype=torch.int8, kv_scales="token"))
        arguments = dict(batch.arguments)
        scale = arguments["k_scale"]
        pages = scale.shape[0]
        stride = 2**31 // (pages - 1) + 64
        far = torch.empty(stride * pages).as_strided(scale.shape, (stride, *scale.stride()[1:]))
        far.copy_(scale)
        near_out, near_lse = path.attention(**arguments)
        far_out, far_lse = path.attention(**{**arguments, "k_scale": far})
        batch.check(near_out, near_lse)
        assert torch.equal(near_out, far_out)
        assert torch.equal(near_lse, far_lse)


def test_compiled() -> None:
    """The one that compiles for the CPU, which takes seconds for each input."""
    TestA4OffsetsPast32Bits().test_far_pages_equal_near_pages(COMPILED)
