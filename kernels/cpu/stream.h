// Few rows: keys and values are read once from where they lie, past all rows at once, a few rows at a time in registers.
#pragma once

#include "blocks.h"

namespace tcport_cpu::TCPORT_ISA {

constexpr int STREAM_ROWS = 4;
constexpr int STREAM_COLUMNS = W == 16 ? 4 : 2;  // vectors of V per pass: 4 rows of them fit the registers
constexpr int STREAM_KEYS = 4;

// Rows of a block, and those of the next one, which are fetched meanwhile.
template <class T>
struct Rows {
  const T* row[MAX_KEYS];
  const T* next[MAX_KEYS];
  int64_t next_count = 0;
};

// How a row of queries meets a row of keys: fp32, or pairs of bf16 in one instruction.
template <class T>
struct Dot {
  using Query = float;
  static constexpr int STEP = W;
  static TCPORT_INLINE vf load_query(const float* q) { return load(q); }
  static TCPORT_INLINE vf load_key(const T* k) { return load(k); }
  static TCPORT_INLINE vf add(vf sum, vf q, vf k) { return sum + q * k; }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
  using Query = bf16;
  static constexpr int STEP = 2 * W;
  static TCPORT_INLINE vf load_query(const bf16* q) { return load_bits<vf>(q); }
  static TCPORT_INLINE vf load_key(const bf16* k) { return load_bits<vf>(k); }
  static TCPORT_INLINE vf add(vf sum, vf q, vf k) { return (vf)_mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)k); }
};
#endif

// scores[r][j] = query[r] . key[j] for ROWS rows and 4 keys.
template <class T, int ROWS>
TCPORT_INLINE void dot_tile(const typename Dot<T>::Query* query, int64_t query_stride, const T* const* keys,
                            int64_t dim, float* scores, int64_t scores_stride) {
  vf sums[ROWS][STREAM_KEYS];
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++) {
    TCPORT_UNROLL
    for (int j = 0; j < STREAM_KEYS; j++) sums[r][j] = vf{};
  }
  for (int64_t d = 0; d < dim; d += Dot<T>::STEP) {
    vf k[STREAM_KEYS];
    TCPORT_UNROLL
    for (int j = 0; j < STREAM_KEYS; j++) k[j] = Dot<T>::load_key(keys[j] + d);
    TCPORT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      vf q = Dot<T>::load_query(query + r * query_stride + d);
      TCPORT_UNROLL
      for (int j = 0; j < STREAM_KEYS; j++) sums[r][j] = Dot<T>::add(sums[r][j], q, k[j]);
    }
  }
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++)
    store_sums(scores + r * scores_stride, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

// Dot products of all rows with a block of keys.
template <class T>
inline void stream_scores(const typename Dot<T>::Query* query, int64_t query_stride, int64_t rows, Rows<T>& keys,
                          int64_t count, int64_t dim, float* scores, int64_t scores_stride) {
  const int64_t bytes = dim * sizeof(T);
  for (int64_t j = count; j % STREAM_KEYS; j++) keys.row[j] = keys.row[count - 1];
  for (int64_t j = 0; j < count; j += STREAM_KEYS) {
    for (int64_t i = j; i < j + STREAM_KEYS && i < keys.next_count; i++)
      prefetch(reinterpret_cast<const char*>(keys.next[i]), bytes);
    int64_t r = 0;
    auto tile = [&]<int ROWS>(number<ROWS>) {
      dot_tile<T, ROWS>(query + r * query_stride, query_stride, keys.row + j, dim, scores + r * scores_stride + j,
                        scores_stride);
      r += ROWS;
    };
    while (r + 4 <= rows) tile(number<4>{});
    if (rows - r == 3) tile(number<3>{});
    if (rows - r == 2) tile(number<2>{});
    if (rows - r == 1) tile(number<1>{});
  }
}

// How weights of keys meet rows of values, one key at a time, in fp32.
template <class T>
struct Weigh {
  static constexpr int KEYS = 1;
  static TCPORT_INLINE void stage(float*, int64_t) {}
  template <int COLUMNS>
  static TCPORT_INLINE void load_values(const T* const* rows, int64_t, int64_t column, vf (&v)[COLUMNS]) {
    TCPORT_UNROLL
    for (int c = 0; c < COLUMNS; c++) v[c] = load(rows[0] + column + c * W);
  }
  static TCPORT_INLINE vf load_weight(const float* weights, int64_t j) { return splat(weights[j]); }
  static TCPORT_INLINE vf add(vf sum, vf w, vf v) { return sum + w * v; }
};

#if defined(__AVX512BF16__)
// Two keys at a time: the weights are rounded to bf16, as the values are, and pairs of both meet in one instruction.
template <>
struct Weigh<bf16> {
  static constexpr int KEYS = 2;
  static TCPORT_INLINE __m512i widened(const bf16* p) { return _mm512_castsi256_si512(load_bits<__m256i>(p)); }
  // Rounds weights where they are; behind an odd number of them stands a zero.
  static TCPORT_INLINE void stage(float* weights, int64_t count) {
    if (count % 2) weights[count] = 0;
    for (int64_t j = 0; j < count; j += W) {
      __m256bh rounded = _mm512_cvtneps_pbh((__m512)load(weights + j));
      __builtin_memcpy(reinterpret_cast<char*>(weights) + 2 * j, &rounded, sizeof rounded);
    }
  }
  template <int COLUMNS>
  static TCPORT_INLINE void load_values(const bf16* const* rows, int64_t left, int64_t column, vf (&v)[COLUMNS]) {
    const vu low = ((vu)iota() << 16 | (vu)iota()) + (32u << 16), high = low + (16u << 16 | 16u);  // from both in turn
    TCPORT_UNROLL
    for (int c = 0; c < COLUMNS; c += 2) {
      const bf16 *first = rows[0] + column + c * W, *second = rows[1] + column + c * W;
      if (c + 1 == COLUMNS) {
        __m512i x = widened(first), y = left > 1 ? widened(second) : __m512i{};
        v[c] = (vf)_mm512_permutex2var_epi16(x, (__m512i)low, y);
      } else {
        __m512i x = load_bits<__m512i>(first), y = left > 1 ? load_bits<__m512i>(second) : __m512i{};
        v[c] = (vf)_mm512_permutex2var_epi16(x, (__m512i)low, y);
        v[c + 1] = (vf)_mm512_permutex2var_epi16(x, (__m512i)high, y);
      }
    }
  }
  static TCPORT_INLINE vf load_weight(const float* weights, int64_t j) { return (vf)splat(load_bits<int32_t>(weights + j / 2)); }
  static TCPORT_INLINE vf add(vf sum, vf w, vf v) { return (vf)_mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)v); }
};
#endif

// sums[r][c] = sums[r][c] * rescale[r] + weights[r][j] * value[j][c] over all keys j of the block.
template <class T, int ROWS, int COLUMNS>
TCPORT_INLINE void weigh_tile(const float* weights, int64_t weights_stride, const float* rescale, const T* const* values,
                              int64_t column, int64_t count, float* sums, int64_t sums_stride,
                              const T* const* next, int64_t next_count, int64_t next_bytes) {
  vf acc[ROWS][COLUMNS];
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++) {
    TCPORT_UNROLL
    for (int c = 0; c < COLUMNS; c++) acc[r][c] = load(sums + r * sums_stride + c * W) * rescale[r];
  }
  for (int64_t j = 0; j < count; j += Weigh<T>::KEYS) {
    for (int64_t i = j; i < j + Weigh<T>::KEYS && i < next_count; i++)
      prefetch(reinterpret_cast<const char*>(next[i] + column), next_bytes);
    vf v[COLUMNS];
    Weigh<T>::load_values(values + j, count - j, column, v);
    TCPORT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      vf w = Weigh<T>::load_weight(weights + r * weights_stride, j);
      TCPORT_UNROLL
      for (int c = 0; c < COLUMNS; c++) acc[r][c] = Weigh<T>::add(acc[r][c], w, v[c]);
    }
  }
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++)
    TCPORT_UNROLL
    for (int c = 0; c < COLUMNS; c++) store(sums + r * sums_stride + c * W, acc[r][c]);
}

// Adds the weighted values of a block to what all rows have accumulated. The weights are spent.
template <class T>
inline void stream_values(float* weights, int64_t weights_stride, const float* rescale, int64_t rows,
                          const Rows<T>& values, int64_t count, int64_t dim, float* sums, int64_t sums_stride) {
  for (int64_t r = 0; r < rows; r++) Weigh<T>::stage(weights + r * weights_stride, count);
  auto pass = [&]<int COLUMNS>(number<COLUMNS>, int64_t column) {
    int64_t r = 0;
    auto tile = [&]<int ROWS>(number<ROWS>) {
      weigh_tile<T, ROWS, COLUMNS>(weights + r * weights_stride, weights_stride, rescale + r, values.row, column, count,
                                   sums + r * sums_stride + column, sums_stride, values.next,
                                   r == 0 ? values.next_count : 0, COLUMNS * W * sizeof(T));
      r += ROWS;
    };
    while (r + 4 <= rows) tile(number<4>{});
    if (rows - r == 3) tile(number<3>{});
    if (rows - r == 2) tile(number<2>{});
    if (rows - r == 1) tile(number<1>{});
  };
  int64_t column = 0;
  for (; column + STREAM_COLUMNS * W <= dim; column += STREAM_COLUMNS * W) pass(number<STREAM_COLUMNS>{}, column);
  for (; column < dim; column += W) pass(number<1>{}, column);
}

}  // namespace tcport_cpu::TCPORT_ISA
