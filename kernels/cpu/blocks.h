// A block of keys: where its rows lie in the cache, and a copy of them in fp32 where the kernels cannot read them there.
#pragma once

#include "elements.h"

namespace tcport_cpu::TCPORT_ISA {

constexpr int MAX_KEYS = 256;  // of one block

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Offsets (in elements, without the head's) of the K and V rows of consecutive positions.
struct Block {
  int64_t count = 0;
  int64_t k[MAX_KEYS], v[MAX_KEYS];
};

TCPORT_ONCE void locate(const Attention& a, int64_t table_row, int64_t position, int64_t count, Block& block) {
  block.count = count;
  int64_t entry = position / a.page_size, slot = position % a.page_size;
  for (int64_t i = 0; i < count; entry++, slot = 0) {
    int64_t page = page_at(a, table_row, entry);
    for (; i < count && slot < a.page_size; i++, slot++) {
      block.k[i] = page * a.k.page_stride + slot * a.k.token_stride;
      block.v[i] = page * a.v.page_stride + slot * a.v.token_stride;
    }
  }
}

// Whether the rows of a cache are adjacent elements that vectors of `multiple` elements cover evenly.
TCPORT_INLINE bool adjacent(const Cache& cache, int64_t multiple) {
  return cache.dim_stride == 1 && cache.dim % multiple == 0;
}

// The type kernels read K and V as: their own, where it is one that vectors widen cheaply and rows are adjacent;
// otherwise fp32 from a copy, padded with zeros to a multiple of W.
enum class Reading { copy, f32, f16, bf16 };

TCPORT_ONCE Reading reading_of(const Attention& a, int64_t multiple) {
  if (!adjacent(a.k, multiple) || !adjacent(a.v, W) || a.k.dtype != a.v.dtype) return Reading::copy;
  switch (a.k.dtype) {
    case Dtype::f32: return Reading::f32;
    case Dtype::f16: return Reading::f16;
    case Dtype::bf16: return Reading::bf16;
    default: return Reading::copy;
  }
}

// Points rows at a head's rows in the cache, or at their copies.
template <class Row>
inline void find_rows(const Cache& cache, int64_t head, const int64_t* offsets, int64_t count, float* copy,
                      const Row** rows) {
  if constexpr (__is_same(Row, float))
    if (copy) {
      const int64_t padded = round_up(cache.dim, W);
      for (int64_t i = 0; i < count; i++, copy += padded) {
        widen_row(cache.dtype, cache.data, offsets[i] + head * cache.head_stride, cache.dim_stride, cache.dim, copy,
                  padded);
        rows[i] = copy;
      }
      return;
    }
  const Row* base = reinterpret_cast<const Row*>(cache.data) + head * cache.head_stride;
  for (int64_t i = 0; i < count; i++) rows[i] = base + offsets[i];
}

// One number per key of a block and head, from a per-token scale.
TCPORT_ONCE void scales_of(const Attention& a, const Scale& scale, int64_t table_row, int64_t head, int64_t position,
                           int64_t count, float* to) {
  int64_t entry = position / a.page_size, slot = position % a.page_size;
  for (int64_t i = 0; i < count; entry++, slot = 0) {
    int64_t page = page_at(a, table_row, entry);
    for (; i < count && slot < a.page_size; i++, slot++)
      to[i] = value(scale.data, scale.dtype,
                    page * scale.page_stride + slot * scale.token_stride + head * scale.head_stride);
  }
}

}  // namespace tcport_cpu::TCPORT_ISA
