# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""The warp of the Hopper kernel that takes blocks and fetches their keys and values.

Tiles come as boxes, a box being the part of a page that lies within the tile, 64 dims wide.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tcport.kernels.gluon_names import copy_box
from tcport.kernels.hopper_blocks import begins_with_few, block_in_turn, find_tokens, span, tell

BOX_DIMS = gl.constexpr(64)  # of 16-bit numbers: the 128 bytes of a swizzled row of shared memory


@gluon.jit
def fetch(
    keys, values, boxes, barriers, telling, batch, table, key_place, value_place, counter, items, window,
    NUM_KV_HEADS: gl.constexpr, TOKENS: gl.constexpr, PAGE_SIZE: gl.constexpr, DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Take block after block, tell of each, and ask for its boxes.

    A CTA's first block is that of its number. Those behind are dealt out as CTAs ask: blocks differ, and so does how
    fast multiprocessors are served, so that shares which are fixed before leave some of them idle at the end.
    """
    both_ends = begins_with_few(batch, TOKENS // 2)
    done = items * 0  # tiles of the blocks before
    number = done  # of blocks told of
    item = gl.program_id(0)
    while item < items:
        kv_head = item % NUM_KV_HEADS
        turn = block_in_turn(item // NUM_KV_HEADS, items // NUM_KV_HEADS, both_ends)
        seq, first_token, seq_end, seq_len = find_tokens(turn, batch, TOKENS)
        count = gl.minimum(seq_end - first_token, TOKENS)
        if count > 0:
            block = (count, first_token, seq_len - seq_end + first_token, seq_len, kv_head, seq)
            tell(telling, number, block)
            number += 1
            start, _, end, _, _, tiles = span(block, window, BLOCK_N, BOX, CAUSAL)
            if tiles > 0:
                _fetch_block(
                    keys, values, boxes, barriers, (start, end, tiles), done,
                    (table[0] + seq.to(gl.int64) * table[1], table[2]),
                    (key_place[0], kv_head * key_place[1], kv_head * key_place[2]),
                    (value_place[0], kv_head * value_place[1], kv_head * value_place[2]),
                    PAGE_SIZE, DIM, BLOCK_N, BOX, STAGES,
                )  # fmt: skip
                done += tiles
        item = items
        if items > gl.num_programs(0):
            item = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    nothing = items * 0
    tell(telling, number, (nothing, nothing, nothing, nothing, nothing, nothing))


@gluon.jit
def _fetch_block(
    keys, values, boxes, barriers, extent, done, table, key_place, value_place,
    PAGE_SIZE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the boxes of every tile of a block as buffers become free; ``done`` tiles have gone through them before.

    Keys go one tile ahead of values, as they are multiplied one tile ahead: those of a tile are freed together with the
    values of the tile before. Page ids go one tile ahead of keys, so that no copy waits for them. Boxes behind the last
    visible key fetch that key's box once more: a tile is always the same number of bytes, and table entries that hold
    no visible key are not read.
    """
    key_ready, key_free, value_ready, value_free = barriers
    start, end, tiles = extent
    last = (end - 1) // BOX * BOX
    pages = _load_pages(table, start, last, PAGE_SIZE, BLOCK_N, BOX)
    next_pages = _load_pages(table, start + BLOCK_N, last, PAGE_SIZE, BLOCK_N, BOX)
    stage = done % STAGES
    mbarrier.wait(key_free.index(stage), (done // STAGES & 1) ^ 1)
    _fetch_tile(
        keys, boxes[0], key_ready.index(stage), stage, pages, start, last, key_place, PAGE_SIZE, DIM, BLOCK_N, BOX
    )
    for tile in range(tiles):
        first = start + tile * BLOCK_N
        now = done + tile
        after = now + 1
        if tile + 1 < tiles:
            stage = after % STAGES
            mbarrier.wait(key_free.index(stage), (after // STAGES & 1) ^ 1)
            _fetch_tile(
                keys, boxes[0], key_ready.index(stage), stage, next_pages, first + BLOCK_N, last, key_place,
                PAGE_SIZE, DIM, BLOCK_N, BOX,
            )  # fmt: skip
        later_pages = _load_pages(table, first + 2 * BLOCK_N, last, PAGE_SIZE, BLOCK_N, BOX)
        stage = now % STAGES
        mbarrier.wait(value_free.index(stage), (now // STAGES & 1) ^ 1)
        _fetch_tile(
            values, boxes[1], value_ready.index(stage), stage, pages, first, last, value_place,
            PAGE_SIZE, DIM, BLOCK_N, BOX,
        )  # fmt: skip
        pages = next_pages
        next_pages = later_pages


@gluon.jit
def _load_pages(table, start, last, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr):
    """Page ids of the boxes of a tile."""
    pointer, stride = table
    pages = ()
    for part in gl.static_range(BLOCK_N // BOX):
        key = gl.minimum(start + part * BOX, last)
        pages += (gl.load(pointer + (key // PAGE_SIZE).to(gl.int64) * stride).to(gl.int32),)
    return pages


@gluon.jit
def _fetch_tile(
    cache, boxes, ready, stage, pages, start, last, place,
    PAGE_SIZE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Ask for one tile: the left halves of its boxes one behind the other, then the right ones."""
    page_rows, head_rows, head_dims = place
    PARTS: gl.constexpr = BLOCK_N // BOX
    HALVES: gl.constexpr = DIM // BOX_DIMS
    mbarrier.expect(ready, BLOCK_N * DIM * 2)
    for part in gl.static_range(PARTS):
        at = pages[part] * page_rows + head_rows + gl.minimum(start + part * BOX, last) % PAGE_SIZE
        for half in gl.static_range(HALVES):
            box = boxes.index((stage * HALVES + half) * PARTS + part)
            copy_box(cache, [at, head_dims + half * BOX_DIMS], ready, box)
