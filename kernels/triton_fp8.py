# type: ignore  (device code: Triton's language, which type checkers take for Python)
"""8-bit floats in registers: bits to a wider float and back, on every target.

Caches of 8-bit floats are handed to kernels as bytes, because Triton refuses a pointer to a format that the target's
hardware lacks (e4m3 before compute capability 8.9, the fnuz formats on NVIDIA). Where the hardware converts, it does;
elsewhere a few integer operations do, exactly.

Formats are called by their torch names: ``float8_e4m3fn``, ``float8_e5m2`` (OCP 8-bit floating point specification,
revision 1.0) and ``float8_e4m3fnuz``, ``float8_e5m2fnuz`` (no infinities, one NaN: 0x80; exponent bias one higher).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(bits, FORMAT: tl.constexpr):
    """The values of uint8 ``bits`` as fp16 (fp32 for e5m2fnuz, which reaches past fp16's exponents); exact."""
    if FORMAT == "float8_e4m3fn in hardware":
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "int8":
        # 1024 + 128 + the number, whose last bits are those of the number with its sign turned over.
        value = (bits.to(tl.uint16) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    elif FORMAT == "float8_e5m2":
        value = (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "float8_e5m2fnuz":
        wide = bits.to(tl.uint32)
        value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 21)).to(tl.float32, bitcast=True) * 2.0**111
        value = tl.where(bits == 0x80, float("nan"), value)
    else:
        # e4m3: shifted into an fp16 the exponent is 8 (fn) or 7 (fnuz) too small, subnormals included.
        wide = bits.to(tl.uint16)
        value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        if FORMAT == "float8_e4m3fnuz":
            value = tl.where(bits == 0x80, float("nan"), value * 128.0)
        else:
            value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value * 256.0)
    return value


@triton.jit
def decode_pairs(words, FORMAT: tl.constexpr):
    """The values of the low and of the high bytes of uint16 ``words``, each as :func:`decode` gives them."""
    if FORMAT == "float8_e4m3fn in hardware":
        # Two words at a time, as the conversion takes two bytes that lie together: one permutation of bytes sorts them.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lows, highs;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lows, highs}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lows;
            cvt.rn.f16x2.e4m3x2 $1, highs;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = decode((words & 0xFF).to(tl.uint8), FORMAT), decode((words >> 8).to(tl.uint8), FORMAT)
    return low, high


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """fp32 ``x`` rounded to nearest even and saturated to the largest finite value, as uint8 bits; NaN stays NaN."""
    if FORMAT == "float8_e4m3fn":
        code = _round(x, 3, 7, 448.0, False)
    elif FORMAT == "float8_e4m3fnuz":
        code = _round(x, 3, 8, 240.0, True)
    elif FORMAT == "float8_e5m2":
        code = _round(x, 2, 15, 57344.0, False)
    else:
        code = _round(x, 2, 16, 57344.0, True)
    return code


@triton.jit
def _round(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr):
    magnitude = tl.minimum(tl.abs(x), LIMIT)

    # Normal: round the fp32 bits at the last kept place (half to even), then move the exponent's bias.
    bits = magnitude.to(tl.uint32, bitcast=True)
    bits += (1 << (22 - MANTISSA)) - 1 + ((bits >> (23 - MANTISSA)) & 1)
    normal = (bits >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    # Subnormal: a count of the smallest step. Adding 2^23 leaves it, rounded, in the low bits of an fp32; when it
    # rounds up to 2^MANTISSA, that is the encoding of the smallest normal.
    steps = magnitude * 2.0 ** (BIAS - 1 + MANTISSA) + 8388608.0
    subnormal = steps.to(tl.uint32, bitcast=True) & 0xFF

    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)  # there is no negative zero: its bits are the NaN
    return tl.where(x == x, code | sign, 0x80 if FNUZ else 0x7F).to(tl.uint8)
