// Vectors of fp32 as wide as the instruction set has them, in the compiler's own vector types, and what intrinsics do
// better. Everything per instruction set lives in a namespace of its own: inline code shared between translation units
// would let the linker pick the AVX-512 copy for everyone.
#pragma once

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tcport_cpu::TCPORT_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vc __attribute__((vector_size(W)));

#define TCPORT_INLINE inline __attribute__((always_inline))
#define TCPORT_INLINED __attribute__((always_inline))  // the same, of a lambda
#define TCPORT_ONCE static __attribute__((noinline, unused))  // called from many instances, worth no copy in each

#define TCPORT_UNROLL _Pragma("GCC unroll 16")  // or the arrays of sums stay in memory

constexpr float INF = __builtin_inff();

template <class V>
TCPORT_INLINE V load_bits(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

TCPORT_INLINE vf splat(float x) { return x - vf{}; }  // vf{} + x stays an addition, since it turns -0 into 0
TCPORT_INLINE vi splat(int32_t x) { return vi{} + x; }
TCPORT_INLINE vf load(const float* p) { return load_bits<vf>(p); }
TCPORT_INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
TCPORT_INLINE vf max(vf a, vf b) { return a > b ? a : b; }

// 0, 1, 2, ...
TCPORT_INLINE vi iota() {
  vi v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

TCPORT_INLINE float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}

TCPORT_INLINE float max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < W; i++) m = m > v[i] ? m : v[i];
  return m;
#endif
}

// The sums of four vectors, `apart` from each other.
TCPORT_INLINE void store_sums(float* p, int64_t apart, vf a, vf b, vf c, vf d) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
#else
  __m256 half = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
#endif
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  for (int i = 0; i < 4; i++) p[i * apart] = sums[i];
#else
  p[0] = sum(a), p[apart] = sum(b), p[2 * apart] = sum(c), p[3 * apart] = sum(d);
#endif
}

// Cephes' expf, good to 2 ulp below 88; below -86 it gives 0. NaN stays NaN.
TCPORT_INLINE vf exp(vf x) {
  constexpr float LOWEST = -86.0f, MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf c = x < LOWEST ? splat(LOWEST) : x;
  vf shifted = c * 1.44269504088896341f + MAGIC;
  vf n = shifted - MAGIC;
  vf r = c - n * 0.693359375f + n * 2.12194440e-4f;
  vf y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  vi exponent = ((vi)shifted - 0x4b400000) << 23;
  return x < LOWEST ? splat(0.0f) : (vf)((vi)y + exponent);
}

// Below 1/4 the odd Taylor series, which keeps the relative precision that 1 - exp(-2x) loses.
TCPORT_INLINE vf tanh(vf x) {
  vf a = x < 0.0f ? -x : x;
  vf t = exp(a * -2.0f);
  vf large = (1.0f - t) / (1.0f + t);
  vf s = a * a;
  vf small = a + a * s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835))));
  vf y = a < 0.25f ? small : large;
  return x < 0.0f ? -y : y;
}

TCPORT_INLINE void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace tcport_cpu::TCPORT_ISA
