# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""The warp of the Hopper kernel that fetches keys and values.

Tiles come as boxes, a box being the part of a page that lies within the tile, 64 dims wide.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tcport.kernels.gluon_names import copy_box

BOX_DIMS = gl.constexpr(64)  # of 16-bit numbers: the 128 bytes of a swizzled row of shared memory


@gluon.jit
def fetch(
    keys, values, boxes, barriers, span, table, key_place, value_place,
    PAGE_SIZE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the boxes of every tile as buffers become free.

    Keys go one tile ahead of values, as they are multiplied one tile ahead: those of a tile are freed together with the
    values of the tile before. Page ids go one tile ahead of keys, so that no copy waits for them. Boxes behind the last
    visible key fetch that key's box once more: a tile is always the same number of bytes, and table entries that hold
    no visible key are not read.
    """
    key_ready, key_free, value_ready, value_free = barriers
    start, end, tiles = span
    if tiles > 0:
        last = (end - 1) // BOX * BOX
        pages = _load_pages(table, start, last, PAGE_SIZE, BLOCK_N, BOX)
        next_pages = _load_pages(table, start + BLOCK_N, last, PAGE_SIZE, BLOCK_N, BOX)
        _fetch_tile(keys, boxes[0], key_ready.index(0), 0, pages, start, last, key_place, PAGE_SIZE, DIM, BLOCK_N, BOX)
        for tile in range(tiles):
            first = start + tile * BLOCK_N
            after = tile + 1
            if after < tiles:
                stage = after % STAGES
                mbarrier.wait(key_free.index(stage), (after // STAGES & 1) ^ 1)
                _fetch_tile(
                    keys, boxes[0], key_ready.index(stage), stage, next_pages, first + BLOCK_N, last, key_place,
                    PAGE_SIZE, DIM, BLOCK_N, BOX,
                )  # fmt: skip
            later_pages = _load_pages(table, first + 2 * BLOCK_N, last, PAGE_SIZE, BLOCK_N, BOX)
            stage = tile % STAGES
            mbarrier.wait(value_free.index(stage), (tile // STAGES & 1) ^ 1)
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
