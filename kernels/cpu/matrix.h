// Many rows: a block of keys is packed once and multiplied with all rows, as tiles of a matrix product in registers.
#pragma once

#include "blocks.h"
#include "tiles.h"

namespace tcport_cpu::TCPORT_ISA {

constexpr int PANEL = 2 * W;  // columns of a packed panel

// One 32-bit step of the inner product: an fp32, or a pair of bf16.
struct Single {
  static constexpr int ELEMENTS = 1;
  static constexpr int KEYS = 1;                         // the keys of a block are padded to a multiple of this,
  static constexpr int ROWS = W == 16 ? 4 : 2;           // and rows to one of this
  static constexpr int TILE_ROWS = W == 16 ? 12 : 6;     // of a register tile: 24 (12) sums of 32 (16) registers
  static TCPORT_INLINE vf add(vf sum, vf a, vf b) { return sum + a * b; }
};
#if defined(TCPORT_AMX)
struct Pair {  // a product of tiles takes 16 steps at a time, for 16 rows
  static constexpr int ELEMENTS = 2, KEYS = 2 * TILE, ROWS = TILE, TILE_ROWS = 2 * TILE;
};
#elif defined(__AVX512BF16__)
struct Pair {
  static constexpr int ELEMENTS = 2, KEYS = 2, ROWS = 4, TILE_ROWS = 12;
  static TCPORT_INLINE vf add(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// c[r][:] = c[r][:] * rescale[r] + sum over k in [begin, end) of a[r][k] * panel[k][:]; without rescale, c starts at 0.
template <class Step, int ROWS>
inline void product_tile(const float* a, int64_t a_stride, const float* panel, int64_t begin, int64_t end, float* c,
                         int64_t c_stride, const float* rescale) {
  vf acc[ROWS][2];
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++)
    TCPORT_UNROLL
    for (int i = 0; i < 2; i++) acc[r][i] = rescale ? load(c + r * c_stride + i * W) * rescale[r] : vf{};
  for (int64_t k = begin; k < end; k++) {
    vf b0 = load(panel + k * PANEL), b1 = load(panel + k * PANEL + W);
    TCPORT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      vf x = splat(a[r * a_stride + k]);
      acc[r][0] = Step::add(acc[r][0], x, b0);
      acc[r][1] = Step::add(acc[r][1], x, b1);
    }
  }
  TCPORT_UNROLL
  for (int r = 0; r < ROWS; r++)
    TCPORT_UNROLL
    for (int i = 0; i < 2; i++) store(c + r * c_stride + i * W, acc[r][i]);
}

#if defined(TCPORT_AMX)
// The same with tiles, for 16 or 32 rows. Steps from the last multiple of 16 before `begin` to the first behind `end` are
// taken: one of the factors is 0 there.
template <int ROWS>
inline void tile_product(const float* a, int64_t a_stride, const float* panel, int64_t begin, int64_t end, float* c,
                         int64_t c_stride, const float* rescale) {
  constexpr bool BOTH = ROWS > TILE;
  float *c1 = c + TILE, *c2 = c + TILE * c_stride, *c3 = c2 + TILE;
  if (rescale) {
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < 2; i++) store(c + r * c_stride + i * W, load(c + r * c_stride + i * W) * rescale[r]);
    tile_load<0>(c, c_stride), tile_load<1>(c1, c_stride);
    if (BOTH) tile_load<2>(c2, c_stride), tile_load<3>(c3, c_stride);
  } else {
    tile_zero<0>(), tile_zero<1>();
    if (BOTH) tile_zero<2>(), tile_zero<3>();
  }
  for (int64_t k = begin / TILE * TILE; k < end; k += TILE) {
    tile_load<4>(a + k, a_stride);
    tile_load<6>(panel + k * PANEL, PANEL), tile_load<7>(panel + k * PANEL + TILE, PANEL);
    tile_add_product<0, 4, 6>(), tile_add_product<1, 4, 7>();
    if (BOTH) {
      tile_load<5>(a + TILE * a_stride + k, a_stride);
      tile_add_product<2, 5, 6>(), tile_add_product<3, 5, 7>();
    }
  }
  tile_store<0>(c, c_stride), tile_store<1>(c1, c_stride);
  if (BOTH) tile_store<2>(c2, c_stride), tile_store<3>(c3, c_stride);
}

template <>
inline void product_tile<Pair, TILE>(const float* a, int64_t a_stride, const float* panel, int64_t begin, int64_t end,
                                     float* c, int64_t c_stride, const float* rescale) {
  tile_product<TILE>(a, a_stride, panel, begin, end, c, c_stride, rescale);
}
template <>
inline void product_tile<Pair, 2 * TILE>(const float* a, int64_t a_stride, const float* panel, int64_t begin,
                                         int64_t end, float* c, int64_t c_stride, const float* rescale) {
  tile_product<2 * TILE>(a, a_stride, panel, begin, end, c, c_stride, rescale);
}
#endif

// Calls f(first row, tag of the tile's rows) for tiles that cover `rows` rows, a multiple of Step::ROWS.
template <class Step, class F>
TCPORT_INLINE void for_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + Step::TILE_ROWS <= rows; r += Step::TILE_ROWS) f(r, number<Step::TILE_ROWS>{});
  if constexpr (2 * Step::ROWS < Step::TILE_ROWS)
    for (; r + 2 * Step::ROWS <= rows; r += 2 * Step::ROWS) f(r, number<2 * Step::ROWS>{});
  for (; r < rows; r += Step::ROWS) f(r, number<Step::ROWS>{});
}

// W rows of W 32-bit lanes, transposed; rows at to + i * stride.
TCPORT_INLINE void transpose(vf* r, float* to, int64_t stride) {
#if defined(__AVX512F__)
  __m512 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm512_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
      u[i + 2 * j + 1] = _mm512_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
    }
  for (int j = 0; j < 4; j++) {
    __m512 low = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88), high = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    __m512 low2 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88), high2 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    store(to + j * stride, _mm512_shuffle_f32x4(low, low2, 0x88));
    store(to + (4 + j) * stride, _mm512_shuffle_f32x4(high, high2, 0x88));
    store(to + (8 + j) * stride, _mm512_shuffle_f32x4(low, low2, 0xdd));
    store(to + (12 + j) * stride, _mm512_shuffle_f32x4(high, high2, 0xdd));
  }
#else
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) to[j * stride + i] = r[i][j];
#endif
}

// Keys as panels [PANEL keys] of [32-bit step of the head dim][key]; keys past the count are zeros.
template <class Step, class T>
inline void pack_keys(const T* const* rows, int64_t count, int64_t dim, float* panels) {
  int64_t steps = dim / Step::ELEMENTS;
  for (int64_t j = 0; j < round_up(count, PANEL); j += W) {
    float* to = panels + j / PANEL * steps * PANEL + j % PANEL;
    for (int64_t s = 0; s < steps; s += W) {
      vf r[W];
      for (int i = 0; i < W; i++) {
        if (j + i >= count) r[i] = vf{};
        else if constexpr (Step::ELEMENTS == 2) r[i] = load_bits<vf>(rows[j + i] + 2 * s);
        else r[i] = load(rows[j + i] + s);
      }
      transpose(r, to + s * PANEL, PANEL);
    }
  }
}

// Values as panels [PANEL columns] of [32-bit step of the keys][column]; keys past the count and columns past the dim are
// zeros.
template <class Step, class T>
inline void pack_values(const T* const* rows, int64_t count, int64_t dim, float* panels) {
  int64_t steps = round_up(count, Step::KEYS) / Step::ELEMENTS;
  for (int64_t c = 0; c < round_up(dim, PANEL); c += W) {
    float* to = panels + c / PANEL * steps * PANEL + c % PANEL;
    for (int64_t s = 0; s < steps; s++, to += PANEL) {
      if (c >= dim || s * Step::ELEMENTS >= count) {
        store(to, vf{});
      } else if constexpr (Step::ELEMENTS == 2) {
        vu low = __builtin_convertvector(load_bits<vh>(rows[2 * s] + c), vu), high{};
        if (2 * s + 1 < count) high = __builtin_convertvector(load_bits<vh>(rows[2 * s + 1] + c), vu);
        store(to, (vf)(low | high << 16));
      } else {
        store(to, load(rows[s] + c));
      }
    }
  }
}

}  // namespace tcport_cpu::TCPORT_ISA
