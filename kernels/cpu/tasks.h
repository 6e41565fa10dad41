// What the streaming and the matrix kernel have in common: the rows of a task, their queries, and where results go.
#pragma once

#include "blocks.h"
#include "softmax.h"

namespace tcport_cpu::TCPORT_ISA {

constexpr int MAX_ROWS = 256;  // of one task

// Hands out aligned stretches of the scratch memory; from null it only counts.
struct Arena {
  float* base;
  int64_t used = 0;
  float* take(int64_t floats) {
    float* p = base ? base + used : nullptr;
    used += round_up(floats, 16);
    return p;
  }
};

// Packed row -> token and head.
struct RowIndex {
  const Attention& a;
  const Sequence& sequence;
  int64_t first_row, kv_head;
  int64_t token(int64_t row) const { return sequence.first_token + (first_row + row) / a.group; }
  int64_t head(int64_t row) const { return kv_head * a.group + (first_row + row) % a.group; }
  int64_t position(int64_t row) const {
    return sequence.length - sequence.query_len + (first_row + row) / a.group;
  }
};

// Queries of the rows, `stride` apart, zeros behind the head dim: as fp32, or as the bf16 that they are.
TCPORT_ONCE void stage_queries(const RowIndex& index, int64_t rows, float* to, int64_t stride) {
  const Packed& query = index.a.query;
  for (int64_t r = 0; r < rows; r++) {
    int64_t from = index.token(r) * query.row_stride + index.head(r) * query.head_stride;
    widen_row(query.dtype, query.data, from, query.dim_stride, index.a.k.dim, to + r * stride, stride);
  }
}

TCPORT_ONCE void stage_queries(const RowIndex& index, int64_t rows, bf16* to, int64_t stride) {
  const Packed& query = index.a.query;
  for (int64_t r = 0; r < rows; r++, to += stride) {
    const bf16* from = reinterpret_cast<const bf16*>(query.data) + index.token(r) * query.row_stride +
                       index.head(r) * query.head_stride;
    if (query.dim_stride == 1)
      __builtin_memcpy(to, from, index.a.k.dim * sizeof(bf16));
    else
      for (int64_t d = 0; d < index.a.k.dim; d++) to[d] = from[d * query.dim_stride];
    for (int64_t d = index.a.k.dim; d < stride; d++) to[d].bits = 0;
  }
}

// The rule of one row for a block that starts at `position`, and which of the block's keys it sees.
struct RowView {
  RowRule rule;
  int64_t begin, end;
};

TCPORT_ONCE RowView view_row(const RowIndex& index, int64_t row, float scale, int64_t position, int64_t count,
                             const float* key_scales, const float* value_scales) {
  const Attention& a = index.a;
  int64_t query_position = index.position(row);
  Range seen = visible(a, query_position, index.sequence.length);
  int64_t begin = seen.begin - position, end = seen.end - position;
  begin = begin < 0 ? 0 : begin > count ? count : begin;
  end = end < begin ? begin : end > count ? count : end;
  const uint8_t* mask =
      a.mask ? a.mask + index.token(row) * a.mask_row_stride + position * a.mask_column_stride : nullptr;
  float slope = a.slopes ? a.slopes[index.head(row)] : 0;
  return {{scale, a.softcap, slope, position - query_position, key_scales, value_scales, mask, a.mask_column_stride},
          begin, end};
}

// A scale that one head has for all tokens; 1 where each token has its own.
TCPORT_ONCE float head_scale(const Scale& scale, int64_t head) {
  return scale.data && !scale.per_token() ? value(scale.data, scale.dtype, head * scale.head_stride) : 1.0f;
}

// Unfinished rows: the accumulated values, then the maxima, then the sums.
static int64_t partial_floats(const Attention& a, int64_t rows) { return rows * (round_up(a.v.dim, W) + 2); }

TCPORT_ONCE void keep_partial(const Attention& a, int64_t rows, const RowState& state, float value_scale,
                              const float* sums, int64_t stride, float* to) {
  int64_t dim = round_up(a.v.dim, W);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < dim; d += W) store(to + r * dim + d, load(sums + r * stride + d) * value_scale);
  for (int64_t r = 0; r < rows; r++) {
    to[rows * dim + r] = state.max[r];
    to[rows * (dim + 1) + r] = state.sum[r];
  }
}

TCPORT_ONCE void finish_rows(const RowIndex& index, int64_t rows, const RowState& state, float value_scale, float* sums,
                             int64_t stride) {
  for (int64_t r = 0; r < rows; r++)
    finish_row(index.a, index.token(r), index.head(r), state.max[r], state.sum[r], value_scale, sums + r * stride);
}

}  // namespace tcport_cpu::TCPORT_ISA
