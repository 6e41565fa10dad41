// One task of many rows, of one KV head.
#pragma once

#include "matrix.h"
#include "tasks.h"

namespace tcport_cpu::TCPORT_ISA {

#if defined(TCPORT_AMX)
constexpr int64_t MOST_ROWS = Pair::ROWS;
#else
constexpr int64_t MOST_ROWS = Single::ROWS;
#endif

struct MatrixScratch {
  int64_t rows, query_stride, sums_stride, scores_stride;  // rows padded for the register tiles; strides of a row
  float *query, *sums, *max, *sum, *rescale, *scores, *keys, *values, *key_panels, *value_panels;
  float *key_scales, *value_scales;

  MatrixScratch(const Attention& a, Arena& arena) {
    rows = round_up(a.tile.rows, MOST_ROWS);
    query_stride = round_up(a.k.dim, W);
    sums_stride = round_up(a.v.dim, PANEL);
    scores_stride = round_up(a.tile.keys, PANEL);
    query = arena.take(rows * query_stride);
    sums = arena.take(rows * sums_stride);
    max = arena.take(rows);
    sum = arena.take(rows);
    rescale = arena.take(rows);
    scores = arena.take(rows * scores_stride);
    keys = arena.take(a.tile.keys * query_stride);
    values = arena.take(a.tile.keys * round_up(a.v.dim, W));
    key_panels = arena.take(scores_stride * query_stride);
    value_panels = arena.take(scores_stride * sums_stride);
    key_scales = arena.take(scores_stride);
    value_scales = arena.take(scores_stride);
  }
};

// The keys of a block that some row of a register tile sees.
struct Span {
  int64_t begin, end;
};

template <class Step>
struct Operand {
  using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct Operand<Pair> {
  using type = bf16;
};
#endif

// Rounds a row of weights to bf16, in place.
TCPORT_ONCE void weights_to_bf16(float* row, int64_t count) {
  bf16* to = reinterpret_cast<bf16*>(row);
  for (int64_t i = 0; i < count; i++) {
    bf16 rounded;
    round_to(&rounded, row[i]);
    __builtin_memcpy(to + i, &rounded, sizeof rounded);
  }
}

template <class Row, class Step>
void matrix_rows(const Attention& a, const Task& task, float* scratch, bool copy) {
  const Sequence& sequence = a.sequences[task.sequence];
  const RowIndex index{a, sequence, task.row_begin, task.head_begin};
  const int64_t head = task.head_begin, rows = task.row_end - task.row_begin;
  const int64_t padded_rows = round_up(rows, Step::ROWS);
  Arena arena{scratch};
  MatrixScratch s(a, arena);
  RowState state{s.max, s.sum, s.rescale};

  constexpr int ELEMENTS = Step::ELEMENTS;
  const int64_t steps = s.query_stride / ELEMENTS;  // 32-bit steps of the head dim, and so the stride of a query
  stage_queries(index, rows, reinterpret_cast<typename Operand<Step>::type*>(s.query), s.query_stride);
  for (int64_t i = rows * steps; i < padded_rows * steps; i++) s.query[i] = 0;
  for (int64_t r = 0; r < padded_rows; r++) s.max[r] = -INF, s.sum[r] = 0, s.rescale[r] = 1;
  for (int64_t i = 0; i < padded_rows * s.sums_stride; i++) s.sums[i] = 0;

  Block block;
  const Row* key_rows[MAX_KEYS];
  const Row* value_rows[MAX_KEYS];
  const float scale = a.scale * head_scale(a.k_scale, head);
  const bool key_scales = a.k_scale.data && a.k_scale.per_token();
  const bool value_scales = a.v_scale.data && a.v_scale.per_token();

  for (int64_t position = task.key_begin; position < task.key_end; position += block.count) {
    int64_t end = position / a.tile.keys * a.tile.keys + a.tile.keys;
    locate(a, sequence.table_row, position, (end < task.key_end ? end : task.key_end) - position, block);
    const int64_t count = block.count, padded_keys = round_up(count, Step::KEYS);
    find_rows(a.k, head, block.k, count, copy ? s.keys : nullptr, key_rows);
    pack_keys<Step>(key_rows, count, s.query_stride, s.key_panels);
    find_rows(a.v, head, block.v, count, copy ? s.values : nullptr, value_rows);
    pack_values<Step>(value_rows, count, round_up(a.v.dim, W), s.value_panels);
    if (key_scales) scales_of(a, a.k_scale, sequence.table_row, head, position, count, s.key_scales);
    if (value_scales) scales_of(a, a.v_scale, sequence.table_row, head, position, count, s.value_scales);

    Span spans[MAX_ROWS / Step::ROWS];
    RowView views[MAX_ROWS];
    for (int64_t r = 0; r < rows; r++)
      views[r] = view_row(index, r, scale, position, count, key_scales ? s.key_scales : nullptr,
                          value_scales ? s.value_scales : nullptr);
    for_tiles<Step>(padded_rows, [&]<int ROWS>(int64_t first, number<ROWS>) {
      Span span{count, 0};
      for (int64_t r = first; r < first + ROWS && r < rows; r++)
        if (views[r].begin < views[r].end) {
          span.begin = span.begin < views[r].begin ? span.begin : views[r].begin;
          span.end = span.end > views[r].end ? span.end : views[r].end;
        }
      spans[first / Step::ROWS] = span;
    });

    for (int64_t panel = 0; panel < count; panel += PANEL)
      for_tiles<Step>(padded_rows, [&]<int ROWS>(int64_t r, number<ROWS>) {
        const Span span = spans[r / Step::ROWS];
        if (span.begin < panel + PANEL && span.end > panel)
          product_tile<Step, ROWS>(s.query + r * steps, steps, s.key_panels + panel * steps, 0, steps,
                                   s.scores + r * s.scores_stride + panel, s.scores_stride, nullptr);
      });
    for (int64_t r = 0; r < rows; r++) {
      float* scores = s.scores + r * s.scores_stride;
      softmax_row(scores, views[r].begin, views[r].end, padded_keys, views[r].rule, state, r);
      if constexpr (ELEMENTS == 2) weights_to_bf16(scores, padded_keys);
    }
    const int64_t key_steps = padded_keys / ELEMENTS;
    for (int64_t panel = 0; panel < s.sums_stride; panel += PANEL)
      for_tiles<Step>(padded_rows, [&]<int ROWS>(int64_t r, number<ROWS>) {
        const Span span = spans[r / Step::ROWS];
        if (span.begin < span.end)
          product_tile<Step, ROWS>(s.scores + r * s.scores_stride, s.scores_stride, s.value_panels + panel * key_steps,
                                   span.begin / ELEMENTS, (span.end + ELEMENTS - 1) / ELEMENTS,
                                   s.sums + r * s.sums_stride + panel, s.sums_stride, s.rescale + r);
      });
  }

  const float value_scale = head_scale(a.v_scale, head);
  if (task.partial < 0)
    finish_rows(index, rows, state, value_scale, s.sums, s.sums_stride);
  else
    keep_partial(a, rows, state, value_scale, s.sums, s.sums_stride, a.partials + task.partial);
}

TCPORT_ONCE void matrix_task(const Attention& a, const Task& task, float* scratch) {
#if defined(TCPORT_AMX)
  Tiles tiles;
#endif
#if defined(__AVX512BF16__)
  if (reading_of(a, 2 * W) == Reading::bf16) return matrix_rows<bf16, Pair>(a, task, scratch, false);
#endif
  switch (reading_of(a, W)) {
    case Reading::copy: return matrix_rows<float, Single>(a, task, scratch, true);
    case Reading::f32: return matrix_rows<float, Single>(a, task, scratch, false);
    case Reading::f16: return matrix_rows<f16, Single>(a, task, scratch, false);
    case Reading::bf16: return matrix_rows<bf16, Single>(a, task, scratch, false);
  }
}

}  // namespace tcport_cpu::TCPORT_ISA
