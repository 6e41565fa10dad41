# type: ignore  (device code: Gluon's language, which type checkers take for Python)
"""Softmax of the Hopper kernel, tile by tile: the online one of FlashAttention (arXiv:2205.14135, algorithm 1), base 2.

What weights are relative to need not be a row's maximum, only near it: it stays until a logit is above it by a factor
of 2^8, so that sums are rescaled seldom, and a warp whose rows all keep it skips that. 16-bit weights and fp32 sums
have room for 2^8.

A thread of four warps with 64 rows has, of every eight columns, two of one row and two of the row eight below.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
_LOWEST = gl.constexpr(-(2.0**126))
_NEAR = gl.constexpr(8.0)
_HUGE = gl.constexpr(2.0**27)


@gluon.jit
def nothing_seen(factor, ROWS: gl.constexpr, layout: gl.constexpr):
    """A maximum and a subtrahend of rows that have seen no key: a finite one, also times the factor, and none."""
    maximum = gl.full([ROWS], _LOWEST / gl.maximum(factor, 1.0), gl.float32, layout)
    return maximum, gl.full([ROWS], float("-inf"), gl.float32, layout)


@gluon.jit
def softmax(logits, start, seen, maximum, subtrahend, sums, factor, WINDOWED: gl.constexpr):
    """Weights of one tile's products, the factor on what was summed before, and the new maximum, subtrahend and sums.

    The subtrahend is in what the weights and the factor on sums are relative to, the very same number in both: how far
    it is from the maximum's product does not matter then.

    Args:
        logits: ``[rows, keys]``; the keys are those from ``start`` on.
        seen: the keys that every row of the block sees, and those that each row does: begin, end, begins, ends.
        sums: of the weights; see :func:`sum_by_thread`.
    """
    full_begin, full_end, row_begin, row_end = seen
    if (start + logits.shape[1] > full_end) | (start < full_begin):
        logits = _masked(logits, row_begin - start, row_end - start, WINDOWED)
    new_maximum = gl.maximum(maximum, gl.max(logits, 1))
    # The difference first: of huge maxima the products are rounded by more than it is.
    new_maximum = gl.where((new_maximum - maximum) * factor > _NEAR, new_maximum, maximum)
    row_factor, new_subtrahend = _exactly(new_maximum, factor)
    weights = gl.exp2(gl.fma(logits, row_factor[:, None], -new_subtrahend[:, None]))
    rescale = gl.exp2(subtrahend - new_subtrahend)
    more = sum_by_thread(weights)
    sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, more.type.layout))[:, None] + more
    return weights, rescale, new_maximum, new_subtrahend, sums


@gluon.jit
def _exactly(maximum, factor):
    """What each row's logits are multiplied by, and what is subtracted then: of its maximum that leaves next to 0.

    One instruction multiplies a logit and subtracts, rounding once; what it subtracts is a product rounded before. Of
    huge maxima that leaves them far from 0, on either side: a weight of 0, or infinity. A power of two multiplies
    exactly, and any will do there: neighbours are then so far apart that the weights are 1 and 0. The next at or above
    the factor is taken.
    """
    bits = (factor.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    exact = bits.to(gl.float32, bitcast=True)
    product = maximum * factor
    huge = gl.abs(product) >= _HUGE
    return gl.where(huge, exact, factor), gl.where(huge, maximum * exact, product)


@gluon.jit
def sum_by_thread(tile):
    """Sums ``[rows, 4]`` of what each of the four threads that share a row holds of it: two columns of every eight.

    What one thread has needs no exchange; the four are summed once, behind the last tile.
    """
    return gl.sum(gl.sum(gl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def rescaled(result, factors):
    """``result`` times its rows' ``factors``; a warp whose factors are all 1 branches around it."""
    COUNT: gl.constexpr = result.shape[1] // 2
    return gl.inline_asm_elementwise(
        _rescale_asm(COUNT), _rescale_constraints(COUNT), [result, factors[:, None]], dtype=gl.float32, is_pure=False,
        pack=COUNT,
    )  # fmt: skip


@gluon.constexpr_function
def _rescale_asm(count):
    """Of a thread's ``count`` numbers, of every four two are of its first row and two of its second."""
    return "\n".join(
        [
            "{ .reg .pred p, q; .reg .f32 m0, m1;",
            f"mov.f32 m0, ${2 * count}; mov.f32 m1, ${2 * count + 2};",
            "setp.neu.f32 p, m0, 0f3F800000; setp.neu.or.f32 p, m1, 0f3F800000, p;",
            "vote.sync.any.pred q, p, 0xffffffff;",
            *[f"mov.f32 ${i}, ${count + i};" for i in range(count)],
            "@!q bra.uni DONE;",
            *[f"mul.rn.f32 ${i}, ${i}, m{i >> 1 & 1};" for i in range(count)],
            "DONE: }",
        ]
    )


@gluon.constexpr_function
def _rescale_constraints(count):
    return ",".join(["=f"] * count + ["f"] * (2 * count))


@gluon.jit
def _masked(logits, begins, ends, WINDOWED: gl.constexpr):
    """-inf outside ``[begins, ends)`` of columns of each row; nothing is cut off at ``begins`` without a window.

    Columns are written as numbers: held in registers, they would be made for every tile, masked or not.
    """
    COUNT: gl.constexpr = logits.shape[1] // 2
    if WINDOWED:
        masked = gl.inline_asm_elementwise(
            _mask_asm(COUNT, True), _mask_constraints(COUNT, True), [logits, begins[:, None], ends[:, None]],
            dtype=gl.float32, is_pure=True, pack=COUNT,
        )  # fmt: skip
    else:
        masked = gl.inline_asm_elementwise(
            _mask_asm(COUNT, False), _mask_constraints(COUNT, False), [logits, ends[:, None]],
            dtype=gl.float32, is_pure=True, pack=COUNT,
        )  # fmt: skip
    return masked


@gluon.constexpr_function
def _mask_asm(count, windowed):
    begins, ends = 2 * count, 3 * count if windowed else 2 * count
    lines = ["{ .reg .pred p; .reg .b32 c, b0, b1, e0, e1;", "mov.u32 c, %laneid; and.b32 c, c, 3; shl.b32 c, c, 1;"]
    for name, first in [("e", ends), *([("b", begins)] if windowed else [])]:
        lines += [f"sub.s32 {name}{row}, ${first + 2 * row}, c;" for row in range(2)]
    for i in range(count):
        row, column = i >> 1 & 1, 8 * (i >> 2) + (i & 1)
        lines.append(f"setp.gt.s32 p, e{row}, {column};")
        if windowed:
            lines.append(f"setp.le.and.s32 p, b{row}, {column}, p;")
        lines.append(f"selp.f32 ${i}, ${count + i}, 0fFF800000, p;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _mask_constraints(count, windowed):
    return ",".join(["=f"] * count + ["f"] * count + ["r"] * (2 * count if windowed else count))
