// The element types of caches, queries and results, to and from fp32. Nothing here relies on denormal arithmetic, which
// a process may have switched off.
#pragma once

#include "problem.h"
#include "vec.h"

namespace tcport_cpu::TCPORT_ISA {

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct e4m3fnuz { uint8_t bits; };
struct e5m2fnuz { uint8_t bits; };
struct i8 { int8_t bits; };

template <class T>
struct tag {
  using type = T;
};
template <int N>
struct number {};
// Calls f with the tag of a dtype's element type.
template <class F>
TCPORT_INLINE void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::f64: return f(tag<double>{});
    case Dtype::f32: return f(tag<float>{});
    case Dtype::f16: return f(tag<f16>{});
    case Dtype::bf16: return f(tag<bf16>{});
    case Dtype::e4m3: return f(tag<e4m3>{});
    case Dtype::e5m2: return f(tag<e5m2>{});
    case Dtype::e4m3fnuz: return f(tag<e4m3fnuz>{});
    case Dtype::e5m2fnuz: return f(tag<e5m2fnuz>{});
    case Dtype::i8: return f(tag<i8>{});
  }
}

TCPORT_INLINE float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
TCPORT_INLINE uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

// W adjacent elements as fp32.

TCPORT_INLINE vf load(const bf16* p) { return (vf)(__builtin_convertvector(load_bits<vh>(p), vu) << 16); }
TCPORT_INLINE vf load(const i8* p) { return __builtin_convertvector(load_bits<vc>(p), vf); }

// A float of EXPONENT bits and MANTISSA bits in the low bits of each lane, sign above them. Without INFINITE the topmost
// code alone is NaN (e4m3); with ONE_NAN the only NaN is the code of minus zero and the bias is one more (fnuz).
template <int EXPONENT, int MANTISSA, bool INFINITE, bool ONE_NAN>
TCPORT_INLINE vf widen(vu v) {
  constexpr int BITS = EXPONENT + MANTISSA, BIAS = (1 << (EXPONENT - 1)) - (ONE_NAN ? 0 : 1);
  constexpr uint32_t MAGNITUDE = (1u << BITS) - 1, NORMAL = 1u << MANTISSA, TOP = MAGNITUDE & ~(NORMAL - 1);
  vu magnitude = v & MAGNITUDE;
  vf normal = (vf)((magnitude << (23 - MANTISSA)) + ((127u - BIAS) << 23));
  vf subnormal = __builtin_convertvector((vi)magnitude, vf) * from_bits((127u + 1 - BIAS - MANTISSA) << 23);
  vu y = (vu)((vi)magnitude < (int32_t)NORMAL ? subnormal : normal);
  if (INFINITE) y = (vi)magnitude >= (int32_t)TOP ? y | 0x7f800000u : y;
  if (!INFINITE && !ONE_NAN) y = (vi)magnitude == (int32_t)MAGNITUDE ? vu{} + 0x7fc00000u : y;
  if (ONE_NAN) y = (vi)v == (int32_t)(1u << BITS) ? vu{} + 0x7fc00000u : y;
  return (vf)(y | (v & (1u << BITS)) << (31 - BITS));
}

TCPORT_INLINE vu load_bytes(const void* p) { return __builtin_convertvector(load_bits<vb>(p), vu); }
TCPORT_INLINE vf load(const e4m3* p) { return widen<4, 3, false, false>(load_bytes(p)); }
TCPORT_INLINE vf load(const e5m2* p) { return widen<5, 2, true, false>(load_bytes(p)); }
TCPORT_INLINE vf load(const e4m3fnuz* p) { return widen<4, 3, false, true>(load_bytes(p)); }
TCPORT_INLINE vf load(const e5m2fnuz* p) { return widen<5, 2, false, true>(load_bytes(p)); }

TCPORT_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load_bits<__m256i>(p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(load_bits<__m128i>(p));
#else
  return widen<5, 10, true, false>(__builtin_convertvector(load_bits<vh>(p), vu));
#endif
}

TCPORT_INLINE vf load(const double* p) {
  vf v;
  for (int i = 0; i < W; i++) v[i] = (float)p[i];
  return v;
}

// One element as fp32.
template <class T>
TCPORT_INLINE float value(const T* p) {
  T padded[W] = {*p};
  return load(padded)[0];
}
TCPORT_INLINE float value(const float* p) { return *p; }
TCPORT_INLINE float value(const double* p) { return (float)*p; }

// fp32 rounded to an element, to nearest even.

// Finite floats of up to 5 exponent bits; the caller saturates first, or lets large values become LIMIT_CODE.
template <int EXPONENT, int MANTISSA, int BIAS>
TCPORT_INLINE uint32_t narrow(float x) {
  uint32_t bits = to_bits(x) & 0x7fffffffu;
  constexpr int DROPPED = 23 - MANTISSA;
  // A multiple of the smallest subnormal: adding 2^23 times it leaves the rounded count in the low bits.
  constexpr uint32_t MAGIC = (127u + 23 + 1 - BIAS - MANTISSA) << 23;
  uint32_t subnormal = to_bits(from_bits(bits) + from_bits(MAGIC)) - MAGIC;
  uint32_t rounded = bits + ((1u << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1);
  uint32_t normal = (rounded - ((127u - BIAS) << 23)) >> DROPPED;
  return bits < ((128u - BIAS) << 23) ? subnormal : normal;
}

TCPORT_INLINE bool is_nan(float x) { return x != x; }
TCPORT_INLINE float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
TCPORT_INLINE uint32_t sign(float x) { return to_bits(x) >> 31; }

TCPORT_INLINE void round_to(float* p, float x) { *p = x; }
TCPORT_INLINE void round_to(bf16* p, float x) {
  uint32_t bits = to_bits(x);
  p->bits = is_nan(x) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
TCPORT_INLINE void round_to(f16* p, float x) {
  float a = from_bits(to_bits(x) & 0x7fffffffu);
  uint32_t magnitude = is_nan(x) ? 0x7e00 : a >= 65520.0f ? 0x7c00 : narrow<5, 10, 15>(x);
  p->bits = magnitude | sign(x) << 15;
}
TCPORT_INLINE void round_to(e4m3* p, float x) {
  p->bits = (is_nan(x) ? 0x7f : narrow<4, 3, 7>(clamp(x, 448.0f))) | sign(x) << 7;
}
TCPORT_INLINE void round_to(e5m2* p, float x) {
  p->bits = (is_nan(x) ? 0x7f : narrow<5, 2, 15>(clamp(x, 57344.0f))) | sign(x) << 7;
}
TCPORT_INLINE void round_to(e4m3fnuz* p, float x) {
  uint32_t magnitude = narrow<4, 3, 8>(clamp(x, 240.0f));
  p->bits = is_nan(x) ? 0x80 : magnitude ? magnitude | sign(x) << 7 : 0;
}
TCPORT_INLINE void round_to(e5m2fnuz* p, float x) {
  uint32_t magnitude = narrow<5, 2, 16>(clamp(x, 57344.0f));
  p->bits = is_nan(x) ? 0x80 : magnitude ? magnitude | sign(x) << 7 : 0;
}
TCPORT_INLINE void round_to(i8* p, float x) {
  float y = x > 127.0f ? 127.0f : x < -128.0f ? -128.0f : x;
  p->bits = is_nan(x) ? 0 : (int8_t)__builtin_rintf(y);
}
TCPORT_INLINE void round_to(double* p, float x) { *p = x; }

// Element `index` of an array as fp32.
TCPORT_ONCE float value(const char* data, Dtype dtype, int64_t index) {
  float x = 0;
  with_type(dtype, [&](auto t) { x = value(reinterpret_cast<const typename decltype(t)::type*>(data) + index); });
  return x;
}

// Elements from[0], from[stride], ... as fp32, followed by zeros up to `padded`.
template <class T>
TCPORT_ONCE void widen_row(const T* from, int64_t stride, int64_t count, float* to, int64_t padded) {
  int64_t d = 0;
  if (stride == 1)
    for (; d + W <= count; d += W) store(to + d, load(from + d));
  for (; d < count; d++) to[d] = value(from + d * stride);
  for (; d < padded; d++) to[d] = 0;
}

TCPORT_ONCE void widen_row(Dtype dtype, const char* data, int64_t index, int64_t stride, int64_t count, float* to,
                           int64_t padded) {
  with_type(dtype, [&](auto t) {
    widen_row(reinterpret_cast<const typename decltype(t)::type*>(data) + index, stride, count, to, padded);
  });
}

// Rounds `count` numbers to elements to[index], to[index + stride], ...
TCPORT_ONCE void round_row(const float* from, int64_t count, Dtype dtype, char* data, int64_t index, int64_t stride) {
  with_type(dtype, [&](auto t) {
    auto* to = reinterpret_cast<typename decltype(t)::type*>(data) + index;
    if (stride == 1)
      for (int64_t d = 0; d < count; d++) round_to(to + d, from[d]);
    else
      for (int64_t d = 0; d < count; d++) round_to(to + d * stride, from[d]);
  });
}

}  // namespace tcport_cpu::TCPORT_ISA
