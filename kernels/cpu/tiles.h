// The eight tile registers of AMX: 16 rows of 64 bytes each. TCPORT_EMULATE_AMX stands in for them on processors without,
// so that what is computed with them can be tested there.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__) || defined(TCPORT_EMULATE_AMX)
#define TCPORT_AMX 1

namespace tcport_cpu::TCPORT_ISA {

constexpr int TILE = 16;  // rows, and 32-bit columns

#if !defined(TCPORT_EMULATE_AMX)

// Configures this thread's tiles for as long as it lives.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};  // palette 1 has no more: zeros
    } config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// In assembly: GCC's intrinsics are macros that take no template argument for the number of a tile.
template <int N>
TCPORT_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(N));
}
template <int N>
TCPORT_INLINE void tile_load(const float* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride * 4), "i"(N) : "memory");
}
template <int N>
TCPORT_INLINE void tile_store(float* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride * 4), "i"(N) : "memory");
}
// C += A * B, where a 32-bit element of A and of B is a pair of bf16 along the inner dimension.
template <int C, int A, int B>
TCPORT_INLINE void tile_add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else  // as the operations of TDPBF16PS and its like are written down in Intel's Software Developer's Manual

struct Tiles {
  Tiles() {}
};

inline thread_local float tiles[8][TILE][TILE];

template <int N>
void tile_zero() { __builtin_memset(tiles[N], 0, sizeof tiles[N]); }
template <int N>
void tile_load(const float* p, int64_t stride) {
  for (int i = 0; i < TILE; i++) __builtin_memcpy(tiles[N][i], p + i * stride, sizeof tiles[N][i]);
}
template <int N>
void tile_store(float* p, int64_t stride) {
  for (int i = 0; i < TILE; i++) __builtin_memcpy(p + i * stride, tiles[N][i], sizeof tiles[N][i]);
}
template <int C, int A, int B>
void tile_add_product() {
  auto half = [](float pair, int which) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, pair);
    return __builtin_bit_cast(float, which ? bits & 0xffff0000u : bits << 16);
  };
  for (int m = 0; m < TILE; m++)
    for (int k = 0; k < TILE; k++)
      for (int n = 0; n < TILE; n++)
        for (int which = 0; which < 2; which++)
          tiles[C][m][n] += half(tiles[A][m][k], which) * half(tiles[B][k][n], which);
}

#endif

}  // namespace tcport_cpu::TCPORT_ISA
#endif
