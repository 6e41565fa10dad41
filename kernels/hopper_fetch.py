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
    """Take block after block, tell of each, and fetch it; last, tell that there is none.

    A block is taken when all of the one before has been asked for. Taken four tiles earlier, prompts took up to 3.5%
    longer on an H200: who takes early takes what another would have begun sooner.
    """
    places = (table, key_place, value_place)
    both_ends = begins_with_few(batch, TOKENS // 2)
    done = items * 0  # tiles of the blocks before
    number = done  # of blocks told of
    block, seq = _taken(gl.program_id(0), counter, items, batch, both_ends, NUM_KV_HEADS, TOKENS)
    while block[0] > 0:
        tell(telling, number, block)
        number += 1
        done = _fetch_block(
            keys, values, boxes, barriers, block, seq, done, places, window,
            PAGE_SIZE, DIM, BLOCK_N, BOX, STAGES, CAUSAL,
        )  # fmt: skip
        block, seq = _taken(_next_item(counter, items), counter, items, batch, both_ends, NUM_KV_HEADS, TOKENS)
    tell(telling, number, block)


@gluon.jit
def _fetch_block(
    keys, values, boxes, barriers, block, seq, done, places, window,
    PAGE_SIZE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Ask for the boxes of a block as buffers become free; the tiles that have then been asked for, ``done`` before.

    Keys go one tile ahead of values, as they are multiplied one tile ahead: those of a tile are freed together with the
    values of the tile before. Page ids go one tile ahead of keys, so that no copy waits for them. Boxes behind the last
    visible key fetch that key's box once more: a tile is always the same number of bytes, and table entries that hold
    no visible key are not read.
    """
    key_ready, key_free, value_ready, value_free = barriers
    table, key_place, value_place = places
    start, _, end, _, _, tiles = span(block, window, BLOCK_N, BOX, CAUSAL)
    last = (end - 1) // BOX * BOX
    of_seq = (table[0] + seq.to(gl.int64) * table[1], table[2])
    of_keys = (key_place[0], block[4] * key_place[1], block[4] * key_place[2])
    of_values = (value_place[0], block[4] * value_place[1], block[4] * value_place[2])
    if tiles > 0:
        pages = _load_pages(of_seq, start, last, PAGE_SIZE, BLOCK_N, BOX)
        next_pages = _load_pages(of_seq, start + BLOCK_N, last, PAGE_SIZE, BLOCK_N, BOX)
        _fetch_tile(
            keys, boxes[0], key_ready, key_free, done, pages, start, last, of_keys,
            PAGE_SIZE, DIM, BLOCK_N, BOX, STAGES,
        )  # fmt: skip
        for tile in range(tiles):
            first = start + tile * BLOCK_N
            now = done + tile
            if tile + 1 < tiles:
                _fetch_tile(
                    keys, boxes[0], key_ready, key_free, now + 1, next_pages, first + BLOCK_N, last, of_keys,
                    PAGE_SIZE, DIM, BLOCK_N, BOX, STAGES,
                )  # fmt: skip
            later_pages = _load_pages(of_seq, first + 2 * BLOCK_N, last, PAGE_SIZE, BLOCK_N, BOX)
            _fetch_tile(
                values, boxes[1], value_ready, value_free, now, pages, first, last, of_values,
                PAGE_SIZE, DIM, BLOCK_N, BOX, STAGES,
            )  # fmt: skip
            pages = next_pages
            next_pages = later_pages
        done += tiles
    return done


@gluon.jit
def _taken(item, counter, items, batch, both_ends, NUM_KV_HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """The block of an item, or of the next that has rows, and its sequence; a count of 0: no items are left."""
    block, seq = _block_of(item, items, batch, both_ends, NUM_KV_HEADS, TOKENS)
    while (block[0] == 0) & (item < items):
        item = _next_item(counter, items)
        block, seq = _block_of(item, items, batch, both_ends, NUM_KV_HEADS, TOKENS)
    return block, seq


@gluon.jit
def _next_item(counter, items):
    """A CTA's first item is that of its number. Those behind are dealt out as CTAs ask.

    Blocks differ, and so does how fast multiprocessors are served: shares that are fixed before leave some idle at the
    end.
    """
    item = items
    if items > gl.num_programs(0):
        item = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    return item


@gluon.jit
def _block_of(item, items, batch, both_ends, NUM_KV_HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """An item's block, as it is told of, and its sequence; a count of 0 where no rows are there, or no such item."""
    turn = block_in_turn(item // NUM_KV_HEADS, items // NUM_KV_HEADS, both_ends)
    # A CTA that has taken its last block would wait for offsets that say nothing.
    segments = gl.where(item < items, batch[4] + 2, 0)
    seq, first_token, seq_end, seq_len = find_tokens(turn, batch, segments, TOKENS)
    count = gl.where(item < items, gl.maximum(gl.minimum(seq_end - first_token, TOKENS), 0), 0)
    return (count, first_token, seq_len - seq_end + first_token, seq_len, item % NUM_KV_HEADS), seq


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
    cache, boxes, ready, free, number, pages, start, last, place,
    PAGE_SIZE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for tile ``number`` of the CTA when its buffer is free: left halves of all boxes, then the right ones."""
    page_rows, head_rows, head_dims = place
    PARTS: gl.constexpr = BLOCK_N // BOX
    HALVES: gl.constexpr = DIM // BOX_DIMS
    stage = number % STAGES
    mbarrier.wait(free.index(stage), (number // STAGES & 1) ^ 1)
    mbarrier.expect(ready.index(stage), BLOCK_N * DIM * 2)
    for part in gl.static_range(PARTS):
        at = pages[part] * page_rows + head_rows + gl.minimum(start + part * BOX, last) % PAGE_SIZE
        for half in gl.static_range(HALVES):
            box = boxes.index((stage * HALVES + half) * PARTS + part)
            copy_box(cache, [at, head_dims + half * BOX_DIMS], ready.index(stage), box)
