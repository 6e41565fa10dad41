// Many rows: a block of keys is packed once and multiplied with all rows, as tiles of a matrix product in registers.
#pragma once

#include "blocks.h"

namespace tcport_cpu::TCPORT_ISA {

constexpr int PANEL = 2 * W;                     // columns of a packed panel
constexpr int TILE_ROWS = W == 16 ? 12 : 6;      // rows of a register tile: 24 (12) sums of 32 (16) registers
constexpr int ROW_MULTIPLE = W == 16 ? 4 : 2;    // rows are padded to a multiple of this

// One 32-bit step of the inner product: an fp32, or a pair of bf16.
struct Single {
  static constexpr int ELEMENTS = 1;
  static TCPORT_INLINE vf add(vf sum, vf a, vf b) { return sum + a * b; }
};
#if defined(__AVX512BF16__)
struct Pair {
  static constexpr int ELEMENTS = 2;
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

// Calls f(first row, tag of the tile's rows) for tiles that cover `rows` rows, a multiple of ROW_MULTIPLE.
template <class F>
TCPORT_INLINE void for_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) f(r, number<TILE_ROWS>{});
  for (; r + 2 * ROW_MULTIPLE <= rows; r += 2 * ROW_MULTIPLE) f(r, number<2 * ROW_MULTIPLE>{});
  for (; r < rows; r += ROW_MULTIPLE) f(r, number<ROW_MULTIPLE>{});
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

// Values as panels [PANEL columns] of [32-bit step of the keys][column]; columns past the dim are zeros.
template <class Step, class T>
inline void pack_values(const T* const* rows, int64_t count, int64_t dim, float* panels) {
  int64_t steps = round_up(count, Step::ELEMENTS) / Step::ELEMENTS;
  for (int64_t c = 0; c < round_up(dim, PANEL); c += W) {
    float* to = panels + c / PANEL * steps * PANEL + c % PANEL;
    for (int64_t s = 0; s < steps; s++, to += PANEL) {
      if (c >= dim) {
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
