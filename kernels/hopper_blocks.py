# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""The blocks of the Hopper kernel: in which order they are taken, whose rows they are, what those see, who is told.

A block is a sequence's next ``TOKENS`` tokens, all query heads of one KV head. Blocks are numbered as in
:mod:`tcport.kernels.triton_attention`; with the KV heads they are the items that CTAs take.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TOLD = gl.constexpr(5)  # numbers of a block that are told of
_SEGMENTS_AT_ONCE = gl.constexpr(128)


@gluon.jit
def block_in_turn(turn, blocks, from_both_ends):
    """The block that is taken as number ``turn``.

    Late blocks of a causal sequence are the heavy ones: from the end, they are started first, and light ones fill the
    gaps of the last. With ``from_both_ends`` every third comes from the beginning, so that single tokens there, which
    wait for memory, and prompts behind them, which multiply, are under way together on different multiprocessors.
    """
    return gl.where(
        from_both_ends & (turn % 3 == 2), turn // 3, blocks - 1 - turn + gl.where(from_both_ends, turn // 3, 0)
    )


@gluon.jit
def begins_with_few(batch, FEW: gl.constexpr):
    """Whether the first of several sequences has ``FEW`` query tokens or fewer."""
    cu_seqlens_q, cu_stride, _, _, num_seqs, _ = batch
    several = num_seqs > 1
    first = gl.load(cu_seqlens_q, mask=several, other=0).to(gl.int32)
    second = gl.load(cu_seqlens_q + gl.where(several, cu_stride, 0), mask=several, other=0).to(gl.int32)
    return several & (second - first <= FEW)


@gluon.jit
def find_tokens(block, batch, segments, TOKENS: gl.constexpr):
    """The sequence of a block (-1 and B for the rows before and behind all), the block's first token, and the
    sequence's end and length.

    All comes out of the loads that count the sequences, begin and end as the last offset at or before the block and the
    first behind it: loads by the sequence's number would wait for them.

    Args:
        segments: how many to look through: B + 2, the sequences and what lies before and behind them; 0: nothing is
            looked up, for a block that is not there.
    """
    cu_seqlens_q, cu_stride, seq_lens, lens_stride, num_seqs, num_tokens = batch
    layout: gl.constexpr = gl.BlockedLayout([_SEGMENTS_AT_ONCE // 32], [32], [gl.num_warps()], [0])
    opened = block * 0
    seq_begin = opened
    seq_end = opened + num_tokens
    seq_len = opened
    for first in range(0, segments, _SEGMENTS_AT_ONCE):
        segment = first + gl.arange(0, _SEGMENTS_AT_ONCE, layout=layout)
        offset = segment - 1
        known = (offset >= 0) & (offset <= num_seqs)
        opens = gl.load(cu_seqlens_q + offset.to(gl.int64) * cu_stride, mask=known, other=0).to(gl.int32)
        length = gl.load(seq_lens + offset.to(gl.int64) * lens_stride, mask=known & (offset < num_seqs), other=0)
        before = known & (opens // TOKENS + segment <= block)
        more = gl.sum(before.to(gl.int32), 0)
        opened += more
        seq_begin = gl.maximum(seq_begin, gl.max(gl.where(before, opens, 0), 0))
        seq_end = gl.minimum(seq_end, gl.min(gl.where(known & (before == 0), opens, num_tokens), 0))
        # The block's own segment is the last that opens at or before it: its number is how many do.
        own = gl.max(gl.where(before & (segment == opened), length.to(gl.int32), 0), 0)
        seq_len = gl.where(more > 0, own, seq_len)
    return opened - 1, seq_begin + (block - seq_begin // TOKENS - opened) * TOKENS, seq_end, seq_len


@gluon.jit
def visible(position, seq_len, window, CAUSAL: gl.constexpr):
    """Half-open interval of the keys that a query at ``position`` sees."""
    begin = position * 0
    end = begin + seq_len
    if CAUSAL:
        end = gl.minimum(end, position + 1)
    if window is not None:
        begin = gl.maximum(begin, position - window + 1)
    return begin, end


@gluon.jit
def span(block, window, BLOCK_N: gl.constexpr, BOX: gl.constexpr, CAUSAL: gl.constexpr):
    """Of the keys that some row of a block sees: where its tiles start, which is where a box does, the first and the
    end; the interval that every row sees; and the number of tiles."""
    count, _, first_position, seq_len, _ = block
    begin, full_end = visible(first_position, seq_len, window, CAUSAL)
    full_begin, end = visible(first_position + count - 1, seq_len, window, CAUSAL)
    start = begin // BOX * BOX
    return start, begin, end, full_begin, full_end, gl.maximum(gl.cdiv(end - start, BLOCK_N), 0)


@gluon.jit
def tell(telling, number, block):
    """Tell both groups of block ``number`` when they have read the one before the last; a count of 0: there is none."""
    told, ready, free = telling
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = number % 2
    mbarrier.wait(free.index(slot), (number // 2 & 1) ^ 1)
    for field in gl.static_range(TOLD):
        told.index(slot * TOLD + field).store(gl.full([1], 0, gl.int32, layout) + block[field])
    mbarrier.arrive(ready.index(slot))


@gluon.jit
def heard(telling, number):
    """Block ``number``: its tokens, the first of them and that one's position, the sequence's length, the KV head."""
    told, ready, free = telling
    slot = number % 2
    mbarrier.wait(ready.index(slot), number // 2 & 1)
    block = ()
    for field in gl.static_range(TOLD):
        block += (_number(told.index(slot * TOLD + field)),)
    mbarrier.arrive(free.index(slot))
    return block


@gluon.jit
def _number(place):
    return gl.sum(place.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
