# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""A step of the matmul of few rows and 4-bit weights: from words and pairs of ``x`` to products, in registers.

Weights are the first operand of a tensor core's product, so that eight rows of ``x`` fill it. A product of 128 weights
a column is eight products of 16: eight words a column, of which each gives places ``j`` and ``j + 4``, one shift and
one ``lop3`` for both. What is put in another order for that is ``x``.

A thread's 16 bytes of words are four columns, which lie eight apart in a product: a block of 32 columns is two products
of 16, and column ``4 * g + 2 * p + h`` of it is column ``8 * h + g`` of product p. Everything here that has columns has
them in the order of a product; :func:`as_outputs` undoes it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def product_layout(warps_k, warps_n):
    """Of products ``[warps_k, columns, rows]``."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps_k, warps_n, 1], instr_shape=[1, 16, 8])


@gluon.jit
def add_product(
    total, a, words, scale, zero, element: gl.constexpr, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """``total`` and the product of a step.

    Args:
        total: fp32 ``[warps_k, columns, rows]``.
        a: pairs of neighbours in ``x``, int32 ``[warps_k, rows, 64]``.
        words: four times int32 ``[warps_k, 4, columns]``.
        scale, zero: ``[warps_k, columns]``.
    """
    ROWS: gl.constexpr = a.shape[1]
    PRODUCT: gl.constexpr = product_layout(WARPS_K, WARPS_N)
    # Each level is moved by this (see _pair_of_places), as is its zero point. With 16 rows both are subtracted from
    # each level, which is exact. With eight the sum of a row of ``x`` meets their difference once, and is a product
    # with ones.
    MOVED: gl.constexpr = 128.0 if element == gl.bfloat16 else 1024.0
    SUBTRACTED: gl.constexpr = ROWS > 8
    first = _eight_words(words[0], words[1], WARPS_K, WARPS_N, BLOCKS)
    second = _eight_words(words[2], words[3], WARPS_K, WARPS_N, BLOCKS)
    a_first, a_second = gl.split(a.reshape([WARPS_K, ROWS, 2, 8, 2, 2]).permute([0, 1, 3, 4, 5, 2]))
    part = gl.zeros([WARPS_K, 32 * WARPS_N * BLOCKS, ROWS], gl.float32, PRODUCT)
    sums = gl.zeros([WARPS_K, 16 * WARPS_N, ROWS], gl.float32, PRODUCT)
    zero = _as_columns(zero.to(gl.float32) + MOVED, WARPS_K, WARPS_N, BLOCKS)
    less = None
    if SUBTRACTED:
        OPERAND: gl.constexpr = gl.SliceLayout(2, gl.DotOperandLayout(0, PRODUCT, 2))
        less = gl.convert_layout((-zero).to(element), OPERAND, assert_trivial=True)[:, :, None]
    part, sums = _add_half(part, sums, a_first, first, less, element, WARPS_K, WARPS_N)
    part, sums = _add_half(part, sums, a_second, second, less, element, WARPS_K, WARPS_N)
    if not SUBTRACTED:
        # All columns of the sums are alike: the 16 that there are serve for the others.
        for bit in gl.static_range(BLOCKS.bit_length()):
            sums = gl.join(sums, sums).permute([0, 3, 1, 2]).reshape([WARPS_K, 32 * WARPS_N << bit, ROWS])
        sums = gl.convert_layout(sums, PRODUCT, assert_trivial=True)
        part -= sums * gl.convert_layout(zero, gl.SliceLayout(2, PRODUCT), assert_trivial=True)[:, :, None]
    scale = _as_columns(scale.to(gl.float32), WARPS_K, WARPS_N, BLOCKS)
    return total + part * gl.convert_layout(scale, gl.SliceLayout(2, PRODUCT), assert_trivial=True)[:, :, None]


@gluon.jit
def as_outputs(total, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr, BLOCKS: gl.constexpr):
    """Products ``[warps_k, columns, rows]`` with columns in the order of the output."""
    ROWS: gl.constexpr = total.shape[2]
    apart = total.reshape([WARPS_K, BLOCKS, 2, WARPS_N, 2, 8, ROWS]).permute([0, 1, 3, 5, 2, 4, 6])
    return apart.reshape([WARPS_K, 32 * WARPS_N * BLOCKS, ROWS])


@gluon.jit
def _as_columns(shared, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr, BLOCKS: gl.constexpr):
    """What groups share, ``[warps_k, columns]``, in the order of the columns of a product."""
    apart = shared.reshape([WARPS_K, BLOCKS, WARPS_N, 8, 2, 2]).permute([0, 1, 4, 2, 5, 3])
    return apart.reshape([WARPS_K, 32 * WARPS_N * BLOCKS])


@gluon.jit
def _eight_words(low, high, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr, BLOCKS: gl.constexpr):
    """Two times four rows of words, in the order of a product's columns: ``[warps_k, columns, 8]``."""
    both = gl.join(low, high).reshape([WARPS_K, 4, BLOCKS, WARPS_N, 8, 2, 2, 2]).permute([0, 2, 5, 3, 6, 4, 7, 1])
    return both.reshape([WARPS_K, 32 * WARPS_N * BLOCKS, 8])


@gluon.jit
def _add_half(part, sums, a, words, less, element: gl.constexpr, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr):
    """Add the products of eight words a column: of places 0 and 4, then 1 and 5, 2 and 6, 3 and 7.

    Args:
        a: ``[warps_k, rows, 8, 2, 2]``: pairs (0, 1), (2, 3), (4, 5), (6, 7) of what the places of a word meet.
        words: ``[warps_k, columns, 8]``.
    """
    a01_45, a23_67 = gl.split(a)
    a01, a45 = gl.split(a01_45)
    a23, a67 = gl.split(a23_67)
    a04 = _halves_of("prmt.b32 $0, $1, $2, 0x5410;", a01, a45)
    a15 = _halves_of("prmt.b32 $0, $1, $2, 0x7632;", a01, a45)
    a26 = _halves_of("prmt.b32 $0, $1, $2, 0x5410;", a23, a67)
    a37 = _halves_of("prmt.b32 $0, $1, $2, 0x7632;", a23, a67)
    part, sums = _add_pair_of_places(part, sums, a04, words, 0, less, element, WARPS_K, WARPS_N)
    part, sums = _add_pair_of_places(part, sums, a15, words, 1, less, element, WARPS_K, WARPS_N)
    part, sums = _add_pair_of_places(part, sums, a26, words, 2, less, element, WARPS_K, WARPS_N)
    return _add_pair_of_places(part, sums, a37, words, 3, less, element, WARPS_K, WARPS_N)


@gluon.jit
def _halves_of(asm: gl.constexpr, a, b):
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _add_pair_of_places(
    part, sums, a, words, place: gl.constexpr, less, element: gl.constexpr, WARPS_K: gl.constexpr,
    WARPS_N: gl.constexpr,
):  # fmt: skip
    """Add the product of ``place`` and of the one four places above it; and of ones, where levels stay moved."""
    PRODUCT: gl.constexpr = product_layout(WARPS_K, WARPS_N)
    LEVELS: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    rows = _as_numbers(a, element).reshape([WARPS_K, a.shape[1], 16]).permute([0, 2, 1])
    rows = gl.convert_layout(rows, gl.DotOperandLayout(1, PRODUCT, 2), assert_trivial=True)
    levels = _pair_of_places(words, place, element).reshape([WARPS_K, words.shape[1], 16])
    levels = gl.convert_layout(levels, LEVELS, assert_trivial=True)
    if less is None:
        ones = gl.full([WARPS_K, 16 * WARPS_N, 16], 1.0, element, LEVELS)
        sums = gl.nvidia.ampere.mma_v2(ones, rows, sums)
    else:
        # A register holds two levels of one column. Times one, because a sum alone of bf16 is for sm_90 and later.
        ADD: gl.constexpr = (
            "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }"
            if element == gl.bfloat16
            else "{ .reg .b32 one; mov.b32 one, 0x3c003c00; fma.rn.f16x2 $0, $1, one, $2; }"
        )
        levels = gl.inline_asm_elementwise(ADD, "=r,r,r", [levels, less], dtype=levels.dtype, is_pure=True, pack=2)
    return gl.nvidia.ampere.mma_v2(levels, rows, part), sums


@gluon.jit
def _pair_of_places(words, place: gl.constexpr, element: gl.constexpr):
    """Levels in the low bits of 128 (bf16) or 1024 (fp16) are that number plus the level: no conversion is needed."""
    AND_OR: gl.constexpr = (
        "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;"
        if element == gl.bfloat16
        else "lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xea;"
    )
    two = gl.inline_asm_elementwise(AND_OR, "=r,r", [words >> (4 * place)], dtype=gl.int32, is_pure=True, pack=1)
    return _as_numbers(two, element)


@gluon.jit
def _as_numbers(pairs, element: gl.constexpr):
    """The two numbers of 16 bits in each of ``pairs``, in a dimension of their own."""
    return gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(element, bitcast=True)
