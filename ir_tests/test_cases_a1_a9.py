"""Faults of paged attention that people met in the field (A1-A9), and other inputs of the same kinds.

Every path to a result is held to the same right values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_paths import COMPILED, EVERY_PATH, Path, slots_of
from torch import Tensor

from tcport.kernels import reference
from tcport.testing import Recipe, assert_close, build_batch

HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=EVERY_PATH)
def path(request: pytest.FixtureRequest) -> Path:
    """Every way to a result but the one that compiles for the CPU, which :func:`test_compiled` takes."""
    return request.param


def check(path: Path, recipe: Recipe) -> None:
    batch = build_batch(recipe)
    batch.check(*path.attention(**batch.arguments))


def block_table(*rows: list[int]) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)


class TestA1UnwrittenSlotsPoisonNothing:
    """Bytes past a length are NaN or infinite: the result is that over a cache of zeros, to the bit."""

    lens = (13, 1, 8, 31)

    def run(self, path: Path, dtype: torch.dtype, poison_k: float, poison_v: float, kv_dtype: torch.dtype) -> Any:
        page, dim, num_kv_heads, num_pages = 8, 64, 2, 12
        table = block_table([3, 7], [11], [0], [9, 1, 5, 2])
        torch.manual_seed(1)
        query = torch.randn(4, 8, dim).to(dtype)
        key, value = torch.randn(2, sum(self.lens), num_kv_heads, dim).to(dtype)
        k_cache = torch.full((num_pages, page, num_kv_heads, dim), poison_k).to(kv_dtype)
        v_cache = torch.full((num_pages, page, num_kv_heads, dim), poison_v).to(kv_dtype)
        arguments = {"k_cache": k_cache, "v_cache": v_cache, "block_table": table, "seq_lens": torch.tensor(self.lens)}
        path.write(key, value, k_cache, v_cache, slots_of(table, self.lens, page))
        return path.attention(query=query, **arguments), {"query": query, **arguments}

    @pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
    @pytest.mark.parametrize("quantised", [False, True])
    def test_equal_to_a_zeroed_cache(self, path: Path, dtype: torch.dtype, quantised: bool) -> None:
        kv_dtype = torch.float8_e5m2 if quantised else dtype
        (clean, clean_lse), arguments = self.run(path, dtype, 0.0, 0.0, kv_dtype)
        assert_close(clean, reference.paged_attention(**arguments)[0])
        nan, inf = float("nan"), float("inf")
        for poison_k, poison_v in ((nan, nan), (inf, inf), (-inf, inf), (0.0, nan), (nan, 0.0)):
            (out, lse), _ = self.run(path, dtype, poison_k, poison_v, kv_dtype)
            assert torch.equal(out, clean)
            assert torch.equal(lse, clean_lse)


class TestA2ZeroLengthSequences:
    """A sequence without keys gives zeros and LSE -inf (its sink's logit), and changes nothing for its neighbours."""

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("lens", [(0, 5, 0, 17), (0, 0, 0), (0,), ()])
    def test_decode(self, path: Path, lens: tuple[int, ...], sinks: bool) -> None:
        batch = build_batch(Recipe(lens=lens, sinks=sinks))
        out, lse = path.attention(**batch.arguments)
        batch.check(out, lse)
        for b, length in enumerate(lens):
            if length == 0:
                assert out[b].eq(0).all()
                expected = batch.arguments["sinks"] if sinks else torch.full((4,), -torch.inf)
                torch.testing.assert_close(lse[b], expected, rtol=1e-6, atol=1e-6)  # a sink passes through base 2

    def test_neighbours_are_as_they_are_alone(self, path: Path) -> None:
        batch = build_batch(Recipe(lens=(0, 5, 0, 17))).arguments
        alone = {**batch, **{name: batch[name][1::2] for name in ("query", "block_table", "seq_lens")}}
        assert_close(path.attention(**batch)[0][1::2], path.attention(**alone)[0])

    @pytest.mark.parametrize(
        ("lens", "q_lens"), [((0, 5, 0, 17), (3, 2, 0, 4)), ((6, 0), (0, 0)), ((0,), (3,)), ((), ()), ((4, 9), (0, 2))]
    )
    def test_varlen(self, path: Path, lens: tuple[int, ...], q_lens: tuple[int, ...]) -> None:
        check(path, Recipe(lens=lens, q_lens=q_lens))

    def test_no_tokens_and_no_pages(self, path: Path) -> None:
        batch = build_batch(Recipe(lens=(0, 0), q_lens=(0, 0))).arguments
        batch = {**batch, "k_cache": batch["k_cache"][:0], "v_cache": batch["v_cache"][:0]}
        for arguments in (batch, {**batch, "block_table": batch["block_table"][:, :0]}):
            out, lse = path.attention(**arguments)
            assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))

    def test_tokens_of_no_sequence(self, path: Path) -> None:
        check(path, Recipe(lens=(7, 3), q_lens=(2, 1), uncovered=(2, 3), sinks=True))


class TestA3PlacementOfPagesDoesNotMatter:
    @pytest.mark.parametrize("page", [1, 16, 64, 256])
    def test_two_permutations_agree(self, path: Path, page: int) -> None:
        torch.manual_seed(page)
        lens = torch.tensor([3, 40, page, page + 1])
        counts = [-(-n // page) for n in lens.tolist()]
        num_pages = sum(counts)
        key, value = torch.randn(2, num_pages, page, 2, 16)
        query = torch.randn(4, 4, 16)
        logical = torch.arange(num_pages).split(counts)

        def run(place: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
            """Logical page i lies at ``place[i]``; the sequences come in ``order``."""
            table = block_table(*[place[pages].tolist() for pages in logical])[order]
            k_cache, v_cache = torch.empty_like(key), torch.empty_like(value)
            k_cache[place], v_cache[place] = key, value
            out, lse = path.attention(
                query=query[order], k_cache=k_cache, v_cache=v_cache, block_table=table, seq_lens=lens[order]
            )
            return out[order.argsort()], lse[order.argsort()]

        identity = torch.arange(4)
        expected = reference.paged_attention(query, key, value, block_table(*[p.tolist() for p in logical]), lens)
        permutations = (torch.arange(num_pages).flip(0), torch.randperm(num_pages))
        for place, order in zip(permutations, (identity, torch.tensor([2, 0, 3, 1])), strict=True):
            for actual, right in zip(run(place, order), expected, strict=True):
                assert_close(actual, right)


class TestA5HeadDims:
    @pytest.mark.parametrize("form", ["decode", "varlen"])
    def test_dims_that_are_no_power_of_two(self, path: Path, form: str) -> None:
        """What lies behind each head is NaN, where a tile padded to the next power of two would read."""
        dims = [(80, 80), (40, 40), (96, 96), (112, 112), (120, 120), (160, 160), (192, 128), (72, 24), (1, 1), (3, 5)]
        for pair in path.some(dims):
            check(path, Recipe(lens=(17, 5), q_lens=(4, 1) if form == "varlen" else None, dims=pair, behind=16))


class TestA6HeadRatios:
    @pytest.mark.parametrize("q_lens", [None, (5, 3)])
    def test_ratios_that_are_no_power_of_two(self, path: Path, q_lens: tuple[int, ...] | None) -> None:
        for heads in path.some([(6, 2), (10, 2), (12, 2), (28, 4), (9, 1), (7, 7), (15, 3)]):
            check(path, Recipe(lens=(21, 9), q_lens=q_lens, heads=heads, sinks=True, alibi=True))


class TestA7Strides:
    @pytest.mark.parametrize("layout", ["head_major", "interleaved", "packed", "pool", "mla"])
    def test_strided_equals_contiguous(self, path: Path, layout: Any) -> None:
        """The query is a slice of a fused projection, K and V are views; nothing is moved or copied."""
        dims = (48, 32) if layout == "mla" else (32, 32)
        for storage_offset in path.some([7, 0]):
            recipe = Recipe(
                lens=(30, 3, 11),
                q_lens=(2, 1, 4),
                dims=dims,
                page=4,
                layout=layout,
                strided_query=True,
                storage_offset=storage_offset,
            )
            batch = build_batch(recipe)
            arguments = batch.arguments
            before = [(arguments[name].data_ptr(), arguments[name].stride()) for name in ("k_cache", "v_cache")]
            out, lse = path.attention(**arguments)
            batch.check(out, lse)
            assert before == [(arguments[name].data_ptr(), arguments[name].stride()) for name in ("k_cache", "v_cache")]
            contiguous = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in arguments.items()}
            assert_close(out, path.attention(**contiguous)[0])

    def test_writes_follow_strides(self, path: Path) -> None:
        query_key_value = torch.randn(5, 3, 2, 8)
        key, value = query_key_value[:, 1], query_key_value[:, 2]
        slots = torch.tensor([0, 13, -1, 7, 9])
        layouts = (
            lambda: torch.randn(2, 4, 4, 2, 8).unbind(0),
            lambda: torch.randn(4, 2, 4, 2, 8).unbind(1),
            lambda: torch.randn(2, 4, 2, 4, 8).transpose(2, 3).unbind(0),
            lambda: torch.randn(4, 4, 2, 16).split(8, dim=-1),
            lambda: torch.randn(3, 2, 4, 4, 2, 8)[1].unbind(0),
        )
        for make in path.some(layouts, few=2):
            caches = make()
            expected = [cache.clone() for cache in caches]
            path.write(key, value, *caches, slots)
            reference.kv_write(key, value, *expected, slots)
            assert torch.equal(caches[0], expected[0])
            assert torch.equal(caches[1], expected[1])


class TestA8Windows:
    """``window=W`` is W keys, the token's own included, in every form of the call."""

    page, pages = 4, 8

    def attended(self, path: Path, length: int, tokens: int, window: int, decode: bool) -> list[list[int]]:
        """The positions each of the last ``tokens`` tokens attends to, read off one-hot values."""
        v_cache = torch.eye(self.pages * self.page).view(self.pages, self.page, 1, self.pages * self.page)
        k_cache = torch.zeros(self.pages, self.page, 1, 8)
        table = torch.arange(self.pages)[None]
        if decode:
            queries = {
                "query": torch.zeros(tokens, 1, 8),
                "block_table": table.expand(tokens, self.pages),
                "seq_lens": torch.arange(length - tokens + 1, length + 1),
            }
        else:
            queries = {
                "query": torch.zeros(tokens, 1, 8),
                "block_table": table,
                "seq_lens": torch.tensor([length]),
                "cu_seqlens_q": torch.tensor([0, tokens]),
            }
        out, lse = path.attention(**queries, k_cache=k_cache, v_cache=v_cache, window=window)
        weights = out[:, 0]
        counts = (weights > 0).sum(-1)
        assert_close(weights.sum(-1), torch.ones(tokens))
        assert_close(lse[:, 0], counts.float().log())
        return [row.nonzero()[:, 0].tolist() for row in weights]

    @pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
    def test_the_positions_attended(self, path: Path, decode: bool) -> None:
        for window in path.some([self.page - 1, 1, 2, self.page, self.page + 1]):
            for length in sorted({n for n in (window - 1, window, window + 1, 3 * window) if n > 0}):
                expected = [list(range(max(0, last - window + 1), last + 1)) for last in range(length)]
                assert self.attended(path, length, length, window, decode) == expected

    def test_a_window_without_causality_bounds_the_left_only(self, path: Path) -> None:
        check(path, Recipe(lens=(9, 14), q_lens=(4, 7), page=4, window=3, causal=False))

    @pytest.mark.parametrize("option", ["window", "chunk"])
    def test_what_lies_outside_may_have_been_freed(self, path: Path, option: str) -> None:
        """Pages and table entries that no token sees are garbage in the batch."""
        for q_lens in ((2, 1, 3), None):
            check(path, Recipe(lens=(23, 40, 5), q_lens=q_lens, page=4, **{option: 6}))

    def test_chunks_hold_exactly_their_own_positions(self, path: Path) -> None:
        for chunk in path.some([5, 1, self.page, 3 * self.page, 100]):
            check(path, Recipe(lens=(13, 20), q_lens=(6, 20), page=self.page, chunk=chunk))
            check(path, Recipe(lens=(13, 20), page=self.page, chunk=chunk))


class TestA9SlotsThatNameNothing:
    """Rows with a negative or too large slot are skipped: the whole cache is compared byte by byte."""

    num_pages, page = 4, 16
    slots = (
        [0, 17, -1, 64, 63, -1],
        [-1, -1, -1],
        [64],
        [64, 2**31 - 1, -(2**31), 3],
        [-64, -65, 5, 63],
        [],
    )

    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
    )
    @pytest.mark.parametrize("sentinel", [float("nan"), 7.0])
    def test_every_other_byte_stays(self, path: Path, dtype: torch.dtype, sentinel: float) -> None:
        scale = torch.tensor(0.25) if dtype == torch.int8 else None
        fill = 7.0 if dtype == torch.int8 else sentinel
        for slots in path.some(self.slots):
            for index_dtype in path.some((torch.int64, torch.int32)):
                mapping = torch.tensor(slots, dtype=index_dtype)
                key, value = torch.randn(2, 8, 2, 6)
                caches = [torch.full((self.num_pages, self.page, 2, 6), fill).to(dtype) for _ in range(2)]
                expected = [cache.clone() for cache in caches]
                path.write(key, value, *caches, mapping, k_scale=scale, v_scale=scale)
                for token, slot in enumerate(slots):
                    if 0 <= slot < self.num_pages * self.page:
                        for cache, new in zip(expected, (key, value), strict=True):
                            row = new[token] if scale is None else (new[token] / scale).round()
                            cache.view(-1, 2, 6)[slot] = row.to(dtype)
                for cache, right in zip(caches, expected, strict=True):
                    assert torch.equal(cache.view(torch.uint8), right.view(torch.uint8))

    def test_a_batch_of_padding_writes_nothing(self, path: Path) -> None:
        caches = torch.randn(2, self.num_pages, self.page, 2, 6)
        before = caches.clone()
        path.write(*torch.randn(2, 3, 2, 6), *caches.unbind(), torch.tensor([-1, -1, 64]))
        assert torch.equal(caches, before)

    def test_a_cache_without_pages_takes_nothing(self, path: Path) -> None:
        k_cache, v_cache = torch.empty(2, 0, 16, 2, 6)
        path.write(*torch.randn(2, 3, 2, 6), k_cache, v_cache, torch.tensor([0, -1, 5]))

    def test_fp8_saturates_and_int8_rounds_to_even(self, path: Path) -> None:
        key = torch.tensor([1e6, -1e6, 0.5, 1.5, -2.5, float("inf")]).view(1, 1, 6)
        for dtype, stored in path.some(
            [
                (torch.float8_e4m3fn, [448.0, -448.0, 0.5, 1.5, -2.5, 448.0]),
                (torch.float8_e5m2, [57344.0, -57344.0, 0.5, 1.5, -2.5, 57344.0]),
                (torch.int8, [127.0, -128.0, 0.0, 2.0, -2.0, 127.0]),
            ]
        ):
            k_cache, v_cache = torch.zeros(2, 1, 2, 1, 6).to(dtype)
            scale = torch.ones(1)
            path.write(key, key, k_cache, v_cache, torch.tensor([1]), k_scale=scale, v_scale=scale)
            assert k_cache[0, 1, 0].tolist() == stored
            assert v_cache[0, 1, 0].tolist() == stored
            assert not k_cache[0, 0].float().any()


_ZEROED = "test_equal_to_a_zeroed_cache"
COMPILED_CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "A1": (TestA1UnwrittenSlotsPoisonNothing, _ZEROED, {"dtype": torch.bfloat16, "quantised": False}),
    "A1 fp8": (TestA1UnwrittenSlotsPoisonNothing, _ZEROED, {"dtype": torch.float16, "quantised": True}),
    "A2": (TestA2ZeroLengthSequences, "test_decode", {"lens": (0, 5, 0, 17), "sinks": False}),
    "A2 all empty": (TestA2ZeroLengthSequences, "test_decode", {"lens": (0, 0, 0), "sinks": False}),
    "A2 nothing": (TestA2ZeroLengthSequences, "test_no_tokens_and_no_pages", {}),
    "A3": (TestA3PlacementOfPagesDoesNotMatter, "test_two_permutations_agree", {"page": 16}),
    "A5": (TestA5HeadDims, "test_dims_that_are_no_power_of_two", {"form": "varlen"}),
    "A6": (TestA6HeadRatios, "test_ratios_that_are_no_power_of_two", {"q_lens": (5, 3)}),
    "A7": (TestA7Strides, "test_strided_equals_contiguous", {"layout": "interleaved"}),
    "A7 write": (TestA7Strides, "test_writes_follow_strides", {}),
    "A8 decode": (TestA8Windows, "test_the_positions_attended", {"decode": True}),
    "A8 prefill": (TestA8Windows, "test_the_positions_attended", {"decode": False}),
    "A9": (
        TestA9SlotsThatNameNothing,
        "test_every_other_byte_stays",
        {"dtype": torch.bfloat16, "sentinel": float("nan")},
    ),
    "A9 no row valid": (TestA9SlotsThatNameNothing, "test_a_batch_of_padding_writes_nothing", {}),
}


@pytest.mark.parametrize("case", COMPILED_CASES)
def test_compiled(case: str) -> None:
    """One input of each case through the compiler, which takes seconds for each."""
    tests, name, arguments = COMPILED_CASES[case]
    getattr(tests(), name)(path=COMPILED, **arguments)
