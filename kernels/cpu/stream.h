// Few rows: keys and values are read once from where they lie, past all rows at once, a few rows at a time in registers.
#pragma once

#include "blocks.h"

namespace tcport_cpu::TCPORT_ISA {

constexpr int STREAMS = 4;                     // keys taken at once, from as many pages
constexpr int VALUE_ROWS = 2;                  // rows, and
constexpr int VALUE_COLUMNS = W == 8 ? 4 : 8;  // vectors of V, of a pass: their sums fit the registers
constexpr int64_t LINE = 64;                   // bytes

// Rows of a block, and those to fetch meanwhile. A block is read in four quarters at once, line by line in turn: they lie
// in different pages, and memory serves several streams at once faster than one after the other.
template <class T>
struct Rows {
  const T* row[MAX_KEYS];
  const T* next[MAX_KEYS];
  int64_t next_count = 0;

  // Repeats rows, so that fours are complete and each has a next one.
  void pad(int64_t count) {
    const int64_t end = round_up(count, STREAMS);
    for (int64_t j = count; j < end; j++) row[j] = row[count - 1];
    for (int64_t j = next_count; j < end; j++) next[j] = j ? next[j - 1] : row[0];
  }
};

// Calls f(first, apart) for keys first, first + apart, ... of which there are four: all keys of a block, and up to three
// behind them.
template <class F>
TCPORT_INLINE void for_fours(int64_t count, F&& f) {
  const int64_t quarter = count / STREAMS, rest = quarter * STREAMS;
  for (int64_t j = 0; j < quarter + (rest < count); j++) f(j < quarter ? j : rest, j < quarter ? quarter : 1);
}

template <class T>
TCPORT_INLINE void fetch(const T* p) {
  __builtin_prefetch(p, 0, 2);
}

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

// scores[r][j] = query[r] . key[j] for ROWS rows and four keys, `apart` from each other.
template <class T, int ROWS>
TCPORT_INLINE void dot_tile(const typename Dot<T>::Query* query, int64_t query_stride, const T* const* keys,
                            const T* const* next, int64_t apart, int64_t dim, float* scores, int64_t scores_stride) {
  vf sums[ROWS][STREAMS];
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++)
    TCPORT_UNROLL
    for (int i = 0; i < STREAMS; i++) sums[r][i] = vf{};
  for (int64_t d = 0; d < dim; d += Dot<T>::STEP) {
    vf k[STREAMS];
    TCPORT_UNROLL
    for (int i = 0; i < STREAMS; i++) {
      if (d * sizeof(T) % LINE == 0) fetch(next[i * apart] + d);
      k[i] = Dot<T>::load_key(keys[i * apart] + d);
    }
    TCPORT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      vf q = Dot<T>::load_query(query + r * query_stride + d);
      TCPORT_UNROLL
      for (int i = 0; i < STREAMS; i++) sums[r][i] = Dot<T>::add(sums[r][i], q, k[i]);
    }
  }
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++)
    store_sums(scores + r * scores_stride, apart, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

// Dot products of all rows with a block of keys.
template <class T>
TCPORT_INLINE void stream_scores(const typename Dot<T>::Query* query, int64_t query_stride, int64_t rows,
                                 const Rows<T>& keys, int64_t count, int64_t dim, float* scores,
                                 int64_t scores_stride) {
  for_fours(count, [&](int64_t j, int64_t apart) TCPORT_INLINED {
    for (int64_t r = 0; r < rows; r += 4) {
      const T* const* next = (r ? keys.row : keys.next) + j;  // once is enough
      auto tile = [&]<int ROWS>(number<ROWS>) TCPORT_INLINED {
        dot_tile<T, ROWS>(query + r * query_stride, query_stride, keys.row + j, next, apart, dim,
                          scores + r * scores_stride + j, scores_stride);
      };
      if (rows - r >= 4) tile(number<4>{});
      else if (rows - r == 3) tile(number<3>{});
      else if (rows - r == 2) tile(number<2>{});
      else tile(number<1>{});
    }
  });
}

// How weights of keys meet rows of values, one key at a time, in fp32.
template <class T>
struct Weigh {
  static constexpr int KEYS = 1, COLUMNS = 1;  // of one step
  static TCPORT_INLINE void stage(float*, int64_t) {}
  static TCPORT_INLINE void settle(float*, int64_t) {}
  template <int COUNT>
  static TCPORT_INLINE void load_values(const T* const* rows, int64_t, int64_t column, vf (&v)[COUNT]) {
    v[0] = load(rows[0] + column);
  }
  static TCPORT_INLINE vf load_weight(const float* weight) { return splat(*weight); }
  static TCPORT_INLINE vf add(vf sum, vf w, vf v) { return sum + w * v; }
};

#if defined(__AVX512BF16__)
// Two keys at a time: the weights are rounded to bf16, as the values are, and pairs of both meet in one instruction.
template <>
struct Weigh<bf16> {
  static constexpr int KEYS = 2, COLUMNS = 2;
  static TCPORT_INLINE __m512i widened(const bf16* p) { return _mm512_cvtepu16_epi32(load_bits<__m256i>(p)); }
  static TCPORT_INLINE __m512i rounded(const float* p) {
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)load(p)));
  }
  // Makes pairs of weights where the first of both was, for each four of the block.
  static TCPORT_INLINE void stage(float* weights, int64_t count) {
    const int64_t quarter = count / STREAMS;
    auto pair = [&](int64_t j, int64_t apart, __mmask16 lanes) TCPORT_INLINED {
      const float* p = weights + j;
      __m512i first = _mm512_or_si512(rounded(p), _mm512_slli_epi32(rounded(p + apart), 16));
      __m512i second = _mm512_or_si512(rounded(p + 2 * apart), _mm512_slli_epi32(rounded(p + 3 * apart), 16));
      _mm512_mask_storeu_epi32(weights + j, lanes, first);
      _mm512_mask_storeu_epi32(weights + j + apart, lanes, second);
    };
    if (quarter * STREAMS < count) pair(quarter * STREAMS, 1, 1);
    for (int64_t j = 0; j < quarter; j += W) pair(j, quarter, quarter - j < W ? (1u << (quarter - j)) - 1 : 0xffff);
  }
  template <int COUNT>
  static TCPORT_INLINE void load_values(const bf16* const* rows, int64_t apart, int64_t column, vf (&v)[COUNT]) {
    const bf16 *first = rows[0] + column, *second = rows[apart] + column;
    if constexpr (COUNT == 1) {
      v[0] = (vf)_mm512_or_si512(widened(first), _mm512_slli_epi32(widened(second), 16));
    } else {
      __m512i x = load_bits<__m512i>(first), y = load_bits<__m512i>(second);
      asm("" : "+v"(x), "+v"(y));  // or GCC loads both twice
      v[0] = (vf)_mm512_unpacklo_epi16(x, y);
      v[1] = (vf)_mm512_unpackhi_epi16(x, y);
    }
  }
  // Sums of columns taken two vectors at a time stand as the unpacking, the cheapest shuffle, left them: puts a row of
  // them in order, up to column `count`.
  static TCPORT_INLINE void settle(float* sums, int64_t count) {
    const vi low = (iota() & 3) | (iota() & 4) << 2 | (iota() & 8) >> 1;
    for (int64_t c = 0; c < count; c += 2 * W) {
      const __m512 x = (__m512)load(sums + c), y = (__m512)load(sums + c + W);
      store(sums + c, (vf)_mm512_permutex2var_ps(x, (__m512i)low, y));
      store(sums + c + W, (vf)_mm512_permutex2var_ps(x, (__m512i)(low + 8), y));
    }
  }
  static TCPORT_INLINE vf load_weight(const float* pair) { return (vf)splat(load_bits<int32_t>(pair)); }
  static TCPORT_INLINE vf add(vf sum, vf w, vf v) { return (vf)_mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)v); }
};
#endif

// sums[r][c] = sums[r][c] * rescale[r] + weights[r][j] * value[j][c] over all keys j of the block. Meanwhile fetches the
// lines of the next values that begin at those vectors whose bits in `fetched` are set.
template <class T, int ROWS, int COLUMNS>
TCPORT_INLINE void weigh_tile(const float* weights, int64_t weights_stride, const float* rescale, const Rows<T>& values,
                              int64_t column, int64_t count, float* sums, int64_t sums_stride, uint32_t fetched) {
  constexpr int KEYS = Weigh<T>::KEYS, STEP = COLUMNS < Weigh<T>::COLUMNS ? COLUMNS : Weigh<T>::COLUMNS;
  vf acc[ROWS][COLUMNS];
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++) {
    TCPORT_UNROLL
    for (int c = 0; c < COLUMNS; c++) acc[r][c] = load(sums + r * sums_stride + c * W) * rescale[r];
  }
  for_fours(count, [&](int64_t j, int64_t apart) TCPORT_INLINED {
    vf w[ROWS][STREAMS / KEYS];
    TCPORT_UNROLL
    for (int r = 0; r < ROWS; r++)
      TCPORT_UNROLL
      for (int i = 0; i < STREAMS / KEYS; i++) w[r][i] = Weigh<T>::load_weight(weights + r * weights_stride + j + i * apart);
    TCPORT_UNROLL
    for (int c = 0; c < COLUMNS; c += STEP) {
      if (fetched >> c & 1)
        TCPORT_UNROLL
        for (int i = 0; i < STREAMS; i++) fetch(values.next[j + i * apart] + column + c * W);
      TCPORT_UNROLL
      for (int i = 0; i < STREAMS / KEYS; i++) {
        vf v[STEP];
        Weigh<T>::load_values(values.row + j + i * KEYS * apart, apart, column + c * W, v);
        TCPORT_UNROLL
        for (int r = 0; r < ROWS; r++)
          TCPORT_UNROLL
          for (int s = 0; s < STEP; s++) acc[r][c + s] = Weigh<T>::add(acc[r][c + s], w[r][i], v[s]);
      }
    }
  });
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++)
    TCPORT_UNROLL
    for (int c = 0; c < COLUMNS; c++) store(sums + r * sums_stride + c * W, acc[r][c]);
}

// Columns that are taken VALUE_COLUMNS vectors at a time; those behind them go one by one.
constexpr int64_t wide_columns(int64_t dim) { return dim / (VALUE_COLUMNS * W) * (VALUE_COLUMNS * W); }

// Adds the weighted values of a block to what all rows have accumulated. The weights are spent.
template <class T>
TCPORT_INLINE void stream_values(float* weights, int64_t weights_stride, const float* rescale, int64_t rows,
                                 const Rows<T>& values, int64_t count, int64_t dim, float* sums, int64_t sums_stride) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = count; j < round_up(count, STREAMS); j++) weights[r * weights_stride + j] = 0;
    Weigh<T>::stage(weights + r * weights_stride, count);
  }
  const int64_t passes = (rows + VALUE_ROWS - 1) / VALUE_ROWS;
  auto tile = [&]<int ROWS, int COLUMNS>(number<ROWS>, number<COLUMNS>, int64_t r, int64_t column) TCPORT_INLINED {
    uint32_t fetched = 0;  // passes over the same columns share their lines
    for (int c = 0; c < COLUMNS; c++) {
      const int64_t byte = (column + c * W) * sizeof(T);
      if (byte % LINE == 0 && byte / LINE % passes == r / VALUE_ROWS) fetched |= 1u << c;
    }
    weigh_tile<T, ROWS, COLUMNS>(weights + r * weights_stride, weights_stride, rescale + r, values, column, count,
                                 sums + r * sums_stride + column, sums_stride, fetched);
  };
  auto pass = [&]<int COLUMNS>(number<COLUMNS> columns, int64_t column) TCPORT_INLINED {
    int64_t r = 0;
    for (; r + VALUE_ROWS <= rows; r += VALUE_ROWS) tile(number<VALUE_ROWS>{}, columns, r, column);
    if (r < rows) tile(number<1>{}, columns, r, column);
  };
  const int64_t wide = wide_columns(dim);
  for (int64_t column = 0; column < wide; column += VALUE_COLUMNS * W) pass(number<VALUE_COLUMNS>{}, column);
  for (int64_t column = wide; column < dim; column += W) pass(number<1>{}, column);
}

}  // namespace tcport_cpu::TCPORT_ISA
