# type: ignore  (device code: Gluon's language, which type checkers take for Python)
# ruff: noqa: RUF005  (it has no unpacking of tuples)
"""A matmul of few rows and 4-bit weights in Gluon, for NVIDIA's tensor cores; meaning in :mod:`tcport.kernels.int4`.

Words go from memory straight to the registers where a tensor core wants them, 16 bytes a load: nothing of the weights
passes shared memory, and threads exchange nothing before their warps' sums are added at the end. What a step does with
its words is :mod:`tcport.kernels.gluon_int4_product`.

ptxas moves loads down to where their values are used, but not into a loop of unknown length. So words are loaded in
front of such a loop, and each step hands the words of those behind it on, and loads those that are ``AHEAD`` of it.
Where all steps' words are loaded in front there is no loop, and ptxas places the loads.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tcport.kernels.call import Launcher
from tcport.kernels.gluon_int4_product import add_product, as_outputs, product_layout
from tcport.kernels.gluon_names import barrier, copy_async, reinterpret
from tcport.kernels.int4 import FewRowsTile, rows_at_once
from tcport.kernels.target import overlaps_launches
from tcport.kernels.triton_arguments import int4_arguments


def few_rows_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, launch: Launcher, tile: FewRowsTile | None = None
) -> Tensor:
    """One program per block of rows and columns; groups are multiples of :data:`~tcport.kernels.int4.STEP`.

    An overlapped launch (CUDA's programmatic dependent launch) waits for the end of the kernel before it, touches no
    memory until then, and only then lets the next one begin: no two after each other are both under way, but for a
    start that waits. Called eagerly only, for what Inductor launches does not overlap.
    """
    tile = tile or FewRowsTile()
    rows, depth, width = x.shape[0], 8 * int(packed.shape[0]), int(scales.shape[1])
    block_m, steps = rows_at_once(rows), tile.steps(depth)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    overlapped = tile.overlapped and overlaps_launches(x.device)
    launch(few_rows_matmul_kernel)[(max(1, -(-rows // block_m)), triton.cdiv(width, tile.block_n))](
        **int4_arguments(_pairs(x), packed, scales, zeros),
        out=out,
        steps=steps,
        BLOCK_M=block_m,
        WARPS_K=tile.warps_k,
        WARPS_N=tile.warps_n,
        BLOCKS=tile.blocks,
        AHEAD=min(tile.ahead, steps),
        STAGED=tile.staged,
        OVERLAPPED=overlapped,
        EARLY=tile.early,
        num_warps=tile.warps_k * tile.warps_n,
        **_bounded(tile.warps_k * tile.warps_n, triton.__version__),
        **({"launch_pdl": True} if overlapped else {}),
    )
    return out


def _bounded(warps: int, triton_version: str) -> dict[str, int]:
    """So many registers a thread that two programs of eight warps share an SM, which has 64 Ki of them.

    For other numbers of warps ptxas needs no telling. For eight, that of Triton 3.6 does not, and the code that was
    timed is what it makes untold; that of 3.9 takes more, and that of 3.7 so few that it loads later.
    """
    return {"maxnreg": 128} if warps == 8 and not triton_version.startswith("3.6.") else {}


def _pairs(x: Tensor) -> Tensor:
    """Neighbours in a row of ``x`` as one int32: the same memory where they lie side by side, else a copy's."""
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


@gluon.constexpr_function
def _bases(count, base):
    """Of a linear layout: ``base`` doubled until there are ``count`` places."""
    return [[size << bit for size in base] for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def x_layout(block_m, warps_k, warps_n):
    """Of pairs of ``x [warps_k, rows, 64]`` as products take them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 0, 32], *_bases(block_m // 8, [0, 8, 0])],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[*_bases(warps_n, [0, 0, 0]), *_bases(warps_k, [1, 0, 0])],
        block_bases=[],
        shape=[warps_k, block_m, 64],
    )


@gluon.constexpr_function
def staging_layout(slices, block_m, warps):
    """Of pairs of ``x [slices, rows, 64]`` as they are copied: 16 bytes a thread, 256 of a row side by side."""
    places = [*_bases(block_m // 2, [0, 2, 0]), *_bases(slices, [1, 0, 0])]
    bits = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *places[bits:]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 1, 0]],
        warp_bases=[*places[:bits], *[[0, 0, 0]] * (bits - len(places))],
        block_bases=[],
        shape=[slices, block_m, 64],
    )


@gluon.constexpr_function
def slices_at_once(steps, warps_k):
    """Slices of ``x`` in a copy: of as many steps as divide them all, and are a power of two."""
    return (steps & -steps) * warps_k


@gluon.constexpr_function
def words_layout(warps_k, warps_n, blocks):
    """Of words ``[warps_k, 4, columns]``."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *_bases(blocks, [0, 0, 32 * warps_n])],
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        warp_bases=[*_bases(warps_n, [0, 0, 32]), *_bases(warps_k, [1, 0, 0])],
        block_bases=[],
        shape=[warps_k, 4, 32 * warps_n * blocks],
    )


@gluon.constexpr_function
def groups_layout(warps_k, warps_n, blocks):
    """Of what groups share ``[warps_k, columns]``."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *_bases(blocks, [0, 32 * warps_n])],
        lane_bases=[[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[*_bases(warps_n, [0, 32]), *_bases(warps_k, [1, 0])],
        block_bases=[],
        shape=[warps_k, 32 * warps_n * blocks],
    )


@gluon.constexpr_function
def sums_layout(block_m, warps_k, warps_n, blocks):
    """Of the warps' sums ``[warps_k, columns, rows]``, with all of an output in one thread."""
    block_n, bits = 32 * warps_n * blocks, (warps_k * warps_n).bit_length() - 1
    places = [*_bases(block_n, [0, 1, 0]), *_bases(block_m, [0, 0, 1])]
    of_warps = places[5 : 5 + bits]
    return gl.DistributedLinearLayout(
        reg_bases=[*_bases(warps_k, [1, 0, 0]), *places[5 + bits :]],
        lane_bases=places[:5],
        warp_bases=[*of_warps, *[[0, 0, 0]] * (bits - len(of_warps))],
        block_bases=[],
        shape=[warps_k, block_n, block_m],
    )


@gluon.jit(do_not_specialize=["rows", "steps"])
def few_rows_matmul_kernel(
    x,
    packed,
    scales,
    zeros,
    out,
    rows,
    steps,
    x_stride_row,
    x_stride_dim,
    packed_stride_word: gl.constexpr,
    packed_stride_column: gl.constexpr,
    scales_stride_group: gl.constexpr,
    scales_stride_column: gl.constexpr,
    zeros_stride_group: gl.constexpr,
    zeros_stride_column: gl.constexpr,
    DEPTH: gl.constexpr,
    WIDTH: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WARPS_K: gl.constexpr,
    WARPS_N: gl.constexpr,
    BLOCKS: gl.constexpr,
    AHEAD: gl.constexpr,
    STAGED: gl.constexpr,
    OVERLAPPED: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Strides of the weights are compiled in, as their shape is: addresses are then a register and a known distance."""
    BLOCK_N: gl.constexpr = 32 * WARPS_N * BLOCKS
    STEP: gl.constexpr = 128 * WARPS_K
    STEPS: gl.constexpr = (DEPTH + STEP - 1) // STEP
    PRODUCT: gl.constexpr = product_layout(WARPS_K, WARPS_N)
    X: gl.constexpr = x_layout(BLOCK_M, WARPS_K, WARPS_N)
    SLICES: gl.constexpr = slices_at_once(STEPS, WARPS_K) if STAGED else WARPS_K
    X_LOADS: gl.constexpr = staging_layout(SLICES, BLOCK_M, WARPS_K * WARPS_N) if STAGED else X
    WORDS: gl.constexpr = words_layout(WARPS_K, WARPS_N, BLOCKS)
    GROUPS: gl.constexpr = groups_layout(WARPS_K, WARPS_N, BLOCKS)
    SUMS: gl.constexpr = sums_layout(BLOCK_M, WARPS_K, WARPS_N, BLOCKS)
    # 64 bytes of a row change places with its number: eight threads, of two rows, meet in all banks.
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [2, 1, 0])
    first_row, first_column = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, X_LOADS)))[None, :][:, :, None]
    x_k = (gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, X_LOADS))) * 64)[:, None][:, :, None]
    x_k += gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, X_LOADS)))[None, :][:, None, :]
    x_at = x + row.to(gl.int64) * x_stride_row + x_k * x_stride_dim
    word_k = (gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))) * 128)[:, None][:, :, None]
    word = word_k // 8 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :][:, :, None]
    column = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, :][:, None, :]
    word_at = packed + word.to(gl.int64) * packed_stride_word + column.to(gl.int64) * packed_stride_column
    k = (gl.arange(0, WARPS_K, gl.SliceLayout(1, GROUPS)) * 128)[:, None]
    in_group = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, GROUPS))[None, :]

    if OVERLAPPED:  # behind what needs no memory
        gdc_wait()
        gdc_launch_dependents()
    a, scale, zero, words = (), (), (), ()
    if STAGED:
        stage = gl.allocate_shared_memory(gl.int32, [STEPS * WARPS_K // SLICES, SLICES, BLOCK_M, 64], STAGE)
        for part in gl.static_range(STEPS * WARPS_K // SLICES):
            mask = (row < rows) & (x_k + part * SLICES * 64 < DEPTH // 2)
            copy_async(stage.index(part), x_at + part * SLICES * 64 * x_stride_dim, mask=mask)
        async_copy.commit_group()
        stage = reinterpret(stage, gl.int32, [STEPS, WARPS_K, BLOCK_M, 64], STAGE)
    else:
        for step in gl.static_range(AHEAD):
            mask = (row < rows) & (x_k + step * (STEP // 2) < DEPTH // 2)
            a = a + (gl.load(x_at + step * (STEP // 2) * x_stride_dim, mask=mask, other=0),)
    for step in gl.static_range(AHEAD):
        at_k = k + step * STEP
        scale = scale + (
            _of_groups(scales, at_k, in_group, scales_stride_group, scales_stride_column, DEPTH, WIDTH, GROUP),
        )
        zero = zero + (_of_groups(zeros, at_k, in_group, zeros_stride_group, zeros_stride_column, DEPTH, WIDTH, GROUP),)
        there = (word_k + step * STEP < DEPTH) & (column < WIDTH)
        words = words + (_of_words(word_at + step * (STEP // 8) * packed_stride_word, there, packed_stride_word),)
    if STAGED:
        barrier()  # loads of words stay in front of it, and so in front of the wait
        async_copy.wait_group(0)
        barrier()

    total = gl.zeros([WARPS_K, BLOCK_N, BLOCK_M], gl.float32, PRODUCT)
    x_at += AHEAD * (STEP // 2) * x_stride_dim
    word_at += AHEAD * (STEP // 8) * packed_stride_word
    k += AHEAD * STEP
    if AHEAD == STEPS:  # all is there from the start
        for step in gl.static_range(STEPS):
            now = stage.index(step).load(X) if STAGED else a[step]
            total = add_product(
                total, now, words[step], scale[step], zero[step], out.dtype.element_ty, WARPS_K, WARPS_N, BLOCKS
            )
    else:
        for step in range(0, steps):
            if not EARLY:
                now = stage.index(step).load(X) if STAGED else a[0]
                total = add_product(
                    total, now, words[0], scale[0], zero[0], out.dtype.element_ty, WARPS_K, WARPS_N, BLOCKS
                )
            later = (step + AHEAD) * STEP
            scale = scale + (
                _of_groups(scales, k, in_group, scales_stride_group, scales_stride_column, DEPTH, WIDTH, GROUP),
            )
            zero = zero + (
                _of_groups(zeros, k, in_group, zeros_stride_group, zeros_stride_column, DEPTH, WIDTH, GROUP),
            )
            if not STAGED:
                mask = (row < rows) & (x_k + later // 2 < DEPTH // 2)
                a = a + (gl.load(x_at, mask=mask, other=0),)
            there = (word_k + later < DEPTH) & (column < WIDTH)
            words = words + (_of_words(word_at, there, packed_stride_word),)
            x_at += STEP // 2 * x_stride_dim
            word_at += STEP // 8 * packed_stride_word
            k += STEP
            if EARLY:
                _loads_stay_in_front(k)
                now = stage.index(step).load(X) if STAGED else a[0]
                total = add_product(
                    total, now, words[0], scale[0], zero[0], out.dtype.element_ty, WARPS_K, WARPS_N, BLOCKS
                )
            scale, zero, words = scale[1:], zero[1:], words[1:]
            if not STAGED:
                a = a[1:]

    result = gl.sum(gl.convert_layout(as_outputs(total, WARPS_K, WARPS_N, BLOCKS), SUMS), 0)
    out_column = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None]
    out_row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    out_at = out + out_row.to(gl.int64) * WIDTH + out_column
    gl.store(out_at, result.to(out.dtype.element_ty), mask=(out_row < rows) & (out_column < WIDTH))


@gluon.jit
def _loads_stay_in_front(any_int):
    """ptxas moves no load over a barrier; one of a warp costs least."""
    PIN: gl.constexpr = "bar.warp.sync 0xffffffff; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(PIN, "=r,r", [any_int], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _of_words(at, there, stride: gl.constexpr):
    """A step's words: four times four of a column; ``at`` are the first four."""
    return (
        gl.load(at, mask=there),
        gl.load(at + 4 * stride, mask=there),
        gl.load(at + 8 * stride, mask=there),
        gl.load(at + 12 * stride, mask=there),
    )


@gluon.jit
def _of_groups(
    table, k, column, stride_group: gl.constexpr, stride_column: gl.constexpr, DEPTH: gl.constexpr,
    WIDTH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The scales or zero points of the groups in which weights ``k`` are; of none, the middle level."""
    if table is None:
        value = k * 0 + column * 0 + 8
    else:
        at = table + (k // GROUP).to(gl.int64) * stride_group + column.to(gl.int64) * stride_column
        value = gl.load(at, mask=(k < DEPTH) & (column < WIDTH), other=0)
    return value
