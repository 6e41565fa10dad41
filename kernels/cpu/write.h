// New keys and values into their cache slots.
#pragma once

#include "elements.h"

namespace tcport_cpu::TCPORT_ISA {

// `dim` adjacent elements, copied; past the caches where more is written than they hold.
inline void copy_row(const char* from, char* to, int64_t bytes, bool bypass_cache) {
#if defined(__AVX2__)
  if (bypass_cache && bytes % 32 == 0 && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    for (int64_t i = 0; i < bytes; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), load_bits<__m256i>(from + i));
    return;
  }
#else
  (void)bypass_cache;
#endif
  __builtin_memcpy(to, from, bytes);
}

// Divides by the scale, if there is one, and rounds to the cache's dtype.
inline void convert_row(const Packed& source, int64_t from, const Cache& cache, int64_t to, float scale, bool divide) {
  float buffer[256];
  for (int64_t d = 0; d < cache.dim; d += 256) {
    const int64_t count = cache.dim - d < 256 ? cache.dim - d : 256;
    widen_row(source.dtype, source.data, from + d * source.dim_stride, source.dim_stride, count, buffer, count);
    if (divide)
      for (int64_t i = 0; i < count; i++) buffer[i] /= scale;
    round_row(buffer, count, cache.dtype, cache.data, to + d * cache.dim_stride, cache.dim_stride);
  }
}

inline void write_token(const Write& w, const Packed& source, const Cache& cache, const Scale& scale, int64_t token,
                        int64_t page, int64_t slot) {
  int64_t from = token * source.row_stride, to = page * cache.page_stride + slot * cache.token_stride;
  const bool copy = source.dtype == cache.dtype && !scale.data && source.dim_stride == 1 && cache.dim_stride == 1;
  const int64_t size = size_of(cache.dtype);
  if (copy && source.head_stride == cache.dim && cache.head_stride == cache.dim)
    return copy_row(source.data + from * size, cache.data + to * size, w.kv_heads * cache.dim * size, w.bypass_cache);
  for (int64_t head = 0; head < w.kv_heads; head++, from += source.head_stride, to += cache.head_stride) {
    if (copy) {
      copy_row(source.data + from * size, cache.data + to * size, cache.dim * size, w.bypass_cache);
      continue;
    }
    float divisor = 1;
    if (scale.data)
      divisor = value(scale.data, scale.dtype,
                      page * scale.page_stride + slot * scale.token_stride + head * scale.head_stride);
    convert_row(source, from, cache, to, divisor, scale.data != nullptr);
  }
}

static void write(const Write& w, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const int64_t slot = w.slots.at(token, 0);
    if (slot < 0 || slot >= w.num_pages * w.page_size) continue;
    write_token(w, w.key, w.k, w.k_scale, token, slot / w.page_size, slot % w.page_size);
    write_token(w, w.value, w.v, w.v_scale, token, slot / w.page_size, slot % w.page_size);
  }
#if defined(__AVX2__)
  if (w.bypass_cache) _mm_sfence();
#endif
}

}  // namespace tcport_cpu::TCPORT_ISA
