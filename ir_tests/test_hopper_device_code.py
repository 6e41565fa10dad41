"""Device code of the Hopper kernel without a GPU: its softmax, inline PTX included, and which tokens a block has."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from gluon_in_python import Pointer, in_python, value
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcport.kernels import hopper_blocks, hopper_fetch, hopper_softmax

BLOCKS, SOFTMAX = in_python(hopper_blocks), in_python(hopper_softmax)
FETCH = in_python(hopper_fetch, hopper_blocks)
ROWS, KEYS = 64, 16


def whole(*tiles: Tensor, factor: float, visible: tuple[Tensor, Tensor], values: Tensor, windowed: bool) -> Tensor:
    """The rows' weighted sums of ``values [tiles, keys, dim]``, tile by tile as the kernel takes them."""
    begins, ends = visible
    seen = (int(begins.max()), int(ends.min()), value(begins), value(ends))
    of_factor = value(torch.tensor(factor))
    maximum, subtrahend = SOFTMAX.nothing_seen(of_factor, ROWS, None)
    result, sums = value(torch.zeros(ROWS, values.shape[2])), value(torch.zeros(ROWS, 4))
    for at, (tile, rows) in enumerate(zip(tiles, values, strict=True)):
        weights, rescale, maximum, subtrahend, sums = SOFTMAX.softmax(
            value(tile), at * KEYS, seen, maximum, subtrahend, sums, of_factor, windowed
        )
        assert float(weights.max()) < 65504  # the largest finite number of 16 bits
        result = SOFTMAX.rescaled(result, rescale) + weights @ rows
    total = sums.sum(1)
    return (result / torch.where(total > 0, total, 1.0)[:, None]).as_subclass(Tensor)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    factor=st.floats(2.0**-7, 4.0, width=32),
    growth=st.floats(-20, 20),
    windowed=st.booleans(),
    late=st.booleans(),
)
def test_softmax_by_tiles_is_that_of_all_keys(
    seed: int, factor: float, growth: float, windowed: bool, late: bool
) -> None:
    """Logits that grow, fall or stay from tile to tile; some rows see few keys, and some none at all."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, ROWS, KEYS, generator=rng) * 3 + growth * torch.arange(4.0)[:, None, None]
    values = torch.randn(4, KEYS, 8, generator=rng)
    ends = torch.randint(0, 4 * KEYS + 1, (ROWS,), generator=rng) if late else torch.full((ROWS,), 4 * KEYS)
    begins = torch.randint(0, 2 * KEYS, (ROWS,), generator=rng) if windowed else torch.zeros(ROWS, dtype=torch.int64)
    got = whole(*logits, factor=factor, visible=(begins, ends), values=values, windowed=windowed)
    key = torch.arange(4 * KEYS)
    hidden = (key < begins[:, None]) | (key >= ends[:, None])
    exponent = logits.transpose(0, 1).reshape(ROWS, 4 * KEYS).double() * factor * math.log(2)
    weights = exponent.masked_fill(hidden, -torch.inf).softmax(1).nan_to_num(0.0)
    torch.testing.assert_close(got, (weights @ values.flatten(0, 1).double()).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [0.3, 7.7e3, -3e4, 3e8, -3e8, 1e18, -1e30])
@pytest.mark.parametrize("factor", [0.1275, 0.25, 1.4426950408889634])
def test_equal_logits_of_any_size_weigh_the_same_in_every_tile(size: float, factor: float) -> None:
    of_its_tile = torch.eye(5, 8)[:, None, :].expand(5, KEYS, 8)
    all_keys = torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS,), 5 * KEYS)
    logits = torch.full((5, ROWS, KEYS), size)
    got = whole(*logits, factor=factor, visible=all_keys, values=of_its_tile, windowed=False)
    torch.testing.assert_close(got, torch.tensor([0.2] * 5 + [0.0] * 3).expand(ROWS, 8))


@settings(deadline=None)
@given(lower=st.integers(2**22, 2**25), step=st.sampled_from([4.0, 8.0, 12.0]), factor=st.floats(0.5, 2.0, width=32))
def test_a_maximum_that_moves_among_large_logits_leaves_their_shares(lower: int, step: float, factor: float) -> None:
    """Products with the factor are rounded by up to 2: what was summed before must not be scaled by that."""
    of_its_tile = torch.eye(2, 8)[:, None, :].expand(2, KEYS, 8)
    all_keys = torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS,), 2 * KEYS)
    levels = torch.tensor([lower, lower + step], dtype=torch.float32)
    logits = levels[:, None, None].expand(2, ROWS, KEYS)
    got = whole(*logits, factor=factor, visible=all_keys, values=of_its_tile, windowed=False)
    apart = float(levels[1].double() - levels[0].double()) * factor
    share = 1 / (1 + 2.0**-apart)
    torch.testing.assert_close(got[:, 0], torch.full((ROWS,), share * 2.0**-apart), rtol=1e-5, atol=0)
    torch.testing.assert_close(got[:, 1], torch.full((ROWS,), share), rtol=1e-5, atol=0)


def fp32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


@settings(deadline=None)
@given(
    maximum=fp32(-(2.0**90), 2.0**90) | fp32(-(2.0**31), 2.0**31),
    factor=fp32(2.0**-10, 2.0**10),
    above=fp32(0, 1) | st.just(0.0),
    ulps=st.integers(0, 3),
)
def test_what_a_maximum_that_stays_leaves_is_small_in_exact_arithmetic(
    maximum: float, factor: float, above: float, ulps: int
) -> None:
    multiplier, subtrahend = SOFTMAX._exactly(value(torch.tensor([maximum])), value(torch.tensor(factor)))
    multiplier, subtrahend = (Fraction(float(number)) for number in (multiplier, subtrahend))
    left = Fraction(maximum) * multiplier - subtrahend
    if abs(torch.tensor(maximum) * factor) >= 2**27:
        assert math.log2(multiplier).is_integer()
        assert factor <= multiplier < 2 * factor
        assert left == 0
    else:
        assert multiplier == factor
        assert abs(left) <= 4  # half of what neighbours are apart below 2^27
    # A logit for which the maximum stays is at most 8 above it in fp32, and so its weight at most 2^12.
    logit = torch.tensor(maximum) + above * 8 / factor
    for _ in range(ulps):
        logit = torch.nextafter(logit, torch.tensor(torch.inf))
    if float((logit - maximum) * torch.tensor(factor)) <= 8:
        assert Fraction(float(logit)) * multiplier - subtrahend <= Fraction(12001, 1000)


@settings(deadline=None, max_examples=60)
@example(lens=[(at % 7, at % 3) for at in range(127)], around=(2, 4), tokens=4, stride=1)
@example(lens=[(at % 7, at % 3) for at in range(260)], around=(0, 1), tokens=4, stride=1)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=9),
    around=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    tokens=st.sampled_from([1, 4, 8]),
    stride=st.sampled_from([1, 2]),
)
def test_every_token_is_in_one_block_with_its_own_sequence(
    lens: list[tuple[int, int]], around: tuple[int, int], tokens: int, stride: int
) -> None:
    """Tokens before and behind all sequences are in blocks, too, of no keys; 128 lengths are looked at at once."""
    counts = [around[0], *(queries for queries, _ in lens), around[1]]
    bounds = torch.tensor(counts).cumsum(0)[:-1]
    memory = torch.full((bounds.numel(), stride), -(2**30)).int()
    memory[:, 0] = bounds
    lengths = torch.tensor([[keys] + [-(2**30)] * (stride - 1) for _, keys in lens]).int()
    batch = (Pointer(memory.flatten()), stride, Pointer(lengths.flatten()), stride, len(lens), sum(counts))
    keys = [0, *(keys for _, keys in lens), 0]
    want = [(seq - 1, keys[seq], token) for token, seq in enumerate(s for s, n in enumerate(counts) for _ in range(n))]
    got = []
    for block in range(sum(counts) // tokens + len(lens) + 2):
        found = BLOCKS.find_tokens(value(torch.tensor(block)), batch, len(lens) + 2, tokens)
        seq, first, end, length = map(int, found)
        if first < end:
            assert end == sum(counts[: seq + 2])
        got += [(seq, length, token) for token in range(first, min(first + tokens, end))]
    assert got == want
    nowhere = (None, stride, None, stride, len(lens), sum(counts))
    assert next(map(int, BLOCKS.find_tokens(value(torch.tensor(0)), nowhere, 0, tokens))) == -1


@settings(deadline=None, max_examples=40)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=5),
    around=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    tokens=st.sampled_from([1, 4, 8]),
    kv_heads=st.sampled_from([1, 3]),
    window=st.none() | st.integers(1, 40),
    causal=st.booleans(),
    both_ends=st.booleans(),
)
def test_every_token_and_kv_head_is_in_one_item_and_items_without_keys_have_no_tiles(
    lens: list[tuple[int, int]],
    around: tuple[int, int],
    tokens: int,
    kv_heads: int,
    window: int | None,
    causal: bool,
    both_ends: bool,
) -> None:
    """Whoever is told of a block without visible keys must wait for no tile of it."""
    counts = [around[0], *(queries for queries, _ in lens), around[1]]
    bounds = torch.tensor(counts).cumsum(0)[:-1].int()
    lengths = torch.tensor([*(keys for _, keys in lens), -(2**30)]).int()  # never empty, so that it can be indexed
    batch = (Pointer(bounds), 1, Pointer(lengths), 1, len(lens), sum(counts))
    items = (sum(counts) // tokens + len(lens) + 2) * kv_heads
    got = []
    for item in range(items + 3):
        block, seq = FETCH._block_of(
            value(torch.tensor(item)),
            value(torch.tensor(items)),
            batch,
            value(torch.tensor(both_ends)),
            kv_heads,
            tokens,
        )
        count, first, position, seq_len, kv_head = map(int, block)
        got += [(first + at, kv_head) for at in range(count)]
        if count == 0:
            continue  # passed over when it is taken
        sees = seq_len > 0 and (not causal or position + count > 0)
        if window is not None:
            sees = sees and position - window + 1 < seq_len
        assert (int(BLOCKS.span(block, window, KEYS, 8, causal)[5]) > 0) == sees, (block, seq)
    assert sorted(got) == [(token, head) for token in range(sum(counts)) for head in range(kv_heads)]


@given(first=st.integers(0, 9), second=st.integers(0, 9), several=st.booleans())
def test_a_batch_begins_with_few_where_its_first_of_several_does(first: int, second: int, several: bool) -> None:
    bounds = torch.tensor([3, 3 + first, 3 + first + second][: 2 + several]).int()
    batch = (Pointer(bounds), 1, None, 1, 1 + several, 0)
    assert bool(BLOCKS.begins_with_few(batch, 4)) == (several and first <= 4)


@settings(deadline=None)
@given(
    count=st.integers(1, 9),
    behind=st.integers(0, 12),
    seq_len=st.integers(0, 60),
    window=st.none() | st.integers(1, 40),
    causal=st.booleans(),
)
def test_tiles_of_a_block_hold_what_its_rows_see(
    count: int, behind: int, seq_len: int, window: int | None, causal: bool
) -> None:
    first = seq_len - behind - count  # before the first key where a sequence has more tokens than keys
    positions = range(first, first + count)
    sees = [
        {k for k in range(seq_len) if (not causal or k <= p) and (window is None or k > p - window)} for p in positions
    ]
    block = tuple(value(torch.tensor(number)) for number in (count, 0, first, seq_len, 0))
    found = BLOCKS.span(block, window, KEYS, 8, causal)
    start, begin, end, full_begin, full_end, tiles = map(int, found)
    seen = set.union(*sees)
    if seen:
        assert (begin, end) == (min(seen), max(seen) + 1)
        assert start == begin // 8 * 8
        assert tiles == -(-(end - start) // KEYS)
    else:
        assert tiles == 0
    assert set(range(max(full_begin, 0), full_end)) <= set.intersection(*sees)
    if tiles and set.intersection(*sees):
        assert set(range(full_begin, full_end)) == set.intersection(*sees)
