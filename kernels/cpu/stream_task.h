// One task of few rows, over one or more KV heads.
#pragma once

#include "stream.h"
#include "tasks.h"

namespace tcport_cpu::TCPORT_ISA {

struct StreamScratch {
  int64_t query_stride, sums_stride, scores_stride;  // of a row
  float *query, *sums, *max, *sum;                   // of all rows of all heads
  float *rescale, *scores, *keys, *values, *key_scales, *value_scales;

  StreamScratch(const Attention& a, int64_t rows, int64_t heads, Arena& arena) {
    query_stride = round_up(a.k.dim, W);
    sums_stride = round_up(a.v.dim, W);
    scores_stride = round_up(a.tile.stream_keys, W);
    query = arena.take(heads * rows * query_stride);
    sums = arena.take(heads * rows * sums_stride);
    max = arena.take(heads * rows);
    sum = arena.take(heads * rows);
    rescale = arena.take(rows);
    scores = arena.take(rows * scores_stride);
    keys = arena.take(a.tile.stream_keys * query_stride);
    values = arena.take(a.tile.stream_keys * sums_stride);
    key_scales = arena.take(scores_stride);
    value_scales = arena.take(scores_stride);
  }
};

template <class Row>
void stream_rows(const Attention& a, const Task& task, float* scratch, bool copy) {
  const Sequence& sequence = a.sequences[task.sequence];
  const int64_t rows = task.row_end - task.row_begin;
  const int64_t k_dim = round_up(a.k.dim, W), v_dim = round_up(a.v.dim, W);
  Arena arena{scratch};
  StreamScratch s(a, rows, task.head_end - task.head_begin, arena);

  using Query = typename Dot<Row>::Query;
  for (int64_t head = task.head_begin; head < task.head_end; head++)
    stage_queries(RowIndex{a, sequence, task.row_begin, head}, rows,
                  reinterpret_cast<Query*>(s.query + (head - task.head_begin) * rows * s.query_stride),
                  s.query_stride);
  const int64_t all_rows = rows * (task.head_end - task.head_begin);
  for (int64_t r = 0; r < all_rows; r++) s.max[r] = -INF, s.sum[r] = 0;
  for (int64_t i = 0; i < all_rows * s.sums_stride; i++) s.sums[i] = 0;

  Block blocks[2];
  Rows<Row> keys, values;
  auto locate_at = [&](int64_t position, Block& block) {
    int64_t end = position / a.tile.stream_keys * a.tile.stream_keys + a.tile.stream_keys;
    end = end < task.key_end ? end : task.key_end;
    locate(a, sequence.table_row, position, end > position ? end - position : 0, block);
  };
  locate_at(task.key_begin, blocks[0]);
  int current = 0;
  for (int64_t position = task.key_begin; position < task.key_end;) {
    const Block& block = blocks[current];
    Block& next = blocks[1 - current];
    locate_at(position + block.count, next);
    // The rows of a head, and those to fetch meanwhile: where heads lie apart, those of the next head, which is their
    // neighbour; where tokens lie apart, and heads share their lines' pages anyhow, the same head's in the next block.
    auto find = [&](const Cache& cache, int64_t head, const int64_t* here, const int64_t* ahead, float* widened,
                    Rows<Row>& rows_of) {
      find_rows(cache, head, here, block.count, copy ? widened : nullptr, rows_of.row);
      const bool apart = cache.head_stride > cache.token_stride, more = head + 1 < task.head_end;
      const int64_t next_head = !apart ? head : more ? head + 1 : task.head_begin;
      rows_of.next_count = copy ? 0 : apart && more ? block.count : next.count;
      find_rows(cache, next_head, apart && more ? here : ahead, rows_of.next_count, nullptr, rows_of.next);
      rows_of.pad(block.count);
    };
    RowView views[MAX_ROWS];  // of the first head; others differ in what the loop below sets
    for (int64_t r = 0; r < rows; r++)
      views[r] = view_row({a, sequence, task.row_begin, task.head_begin}, r, 1, position, block.count, nullptr, nullptr);
    for (int64_t head = task.head_begin; head < task.head_end; head++) {
      const int64_t first = (head - task.head_begin) * rows;
      const RowIndex index{a, sequence, task.row_begin, head};
      RowState state{s.max + first, s.sum + first, s.rescale};
      const float* key_scales = nullptr;
      const float* value_scales = nullptr;
      if (a.k_scale.data && a.k_scale.per_token()) {
        scales_of(a, a.k_scale, sequence.table_row, head, position, block.count, s.key_scales);
        key_scales = s.key_scales;
      }
      if (a.v_scale.data && a.v_scale.per_token()) {
        scales_of(a, a.v_scale, sequence.table_row, head, position, block.count, s.value_scales);
        value_scales = s.value_scales;
      }
      find(a.k, head, block.k, next.k, s.keys, keys);
      stream_scores<Row>(reinterpret_cast<const Query*>(s.query + first * s.query_stride), s.query_stride, rows, keys,
                       block.count, k_dim, s.scores, s.scores_stride);
      const float scale = a.scale * head_scale(a.k_scale, head);
      for (int64_t r = 0; r < rows; r++) {
        auto& [rule, begin, end] = views[r];
        rule.scale = scale, rule.key_scales = key_scales, rule.value_scales = value_scales;
        if (a.slopes) rule.slope = a.slopes[index.head(r)];
        softmax_row(s.scores + r * s.scores_stride, begin, end, block.count, rule, state, r);
      }
      find(a.v, head, block.v, next.v, s.values, values);
      stream_values<Row>(s.scores, s.scores_stride, s.rescale, rows, values, block.count, v_dim,
                       s.sums + first * s.sums_stride, s.sums_stride);
    }
    position += block.count;
    current = 1 - current;
  }

  for (int64_t head = task.head_begin; head < task.head_end; head++) {
    const int64_t i = head - task.head_begin;
    RowState state{s.max + i * rows, s.sum + i * rows, nullptr};
    float* sums = s.sums + i * rows * s.sums_stride;
    for (int64_t r = 0; r < rows; r++) Weigh<Row>::settle(sums + r * s.sums_stride, wide_columns(v_dim));
    const float scale = head_scale(a.v_scale, head);
    if (task.partial < 0)
      finish_rows(RowIndex{a, sequence, task.row_begin, head}, rows, state, scale, sums, s.sums_stride);
    else
      keep_partial(a, rows, state, scale, sums, s.sums_stride,
                   a.partials + task.partial + i * partial_floats(a, rows));
  }
}

TCPORT_ONCE void stream_task(const Attention& a, const Task& task, float* scratch) {
  switch (reading_of(a, a.k.dtype == Dtype::bf16 ? Dot<bf16>::STEP : W)) {
    case Reading::copy: return stream_rows<float>(a, task, scratch, true);
    case Reading::f32: return stream_rows<float>(a, task, scratch, false);
    case Reading::f16: return stream_rows<f16>(a, task, scratch, false);
    case Reading::bf16: return stream_rows<bf16>(a, task, scratch, false);
  }
}

}  // namespace tcport_cpu::TCPORT_ISA
