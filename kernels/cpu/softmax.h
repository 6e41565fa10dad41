// The online softmax: rows of logits become rows of weights, block after block, and at the end a row of the result.
// Source: FlashAttention, arXiv:2205.14135, algorithm 1.
#pragma once

#include "elements.h"

namespace tcport_cpu::TCPORT_ISA {

// Per row: the largest logit so far, the sum of the weights relative to it, and the factor that the current block puts
// on what was accumulated before it.
struct RowState {
  float* max;
  float* sum;
  float* rescale;
};

// What one row does with the dot products of a block.
struct RowRule {
  float scale, softcap, slope;
  int64_t distance;           // position of the block's first key minus that of the query
  const float* key_scales;    // per key of the block, or null
  const float* value_scales;  // likewise
  const uint8_t* mask;        // of the block's first key, or null
  int64_t mask_stride;
};

// Turns the dot products s[begin:end] into weights, and s[0:begin] and s[end:count] into zeros. s has room for a
// multiple of W.
TCPORT_ONCE void softmax_row(float* s, int64_t begin, int64_t end, int64_t count, const RowRule& rule, RowState& state,
                             int64_t row) {
  for (int64_t j = 0; j < begin; j++) s[j] = 0;
  for (int64_t j = end; j < count; j++) s[j] = 0;
  state.rescale[row] = 1;
  if (begin >= end) return;

  vf highest = splat(-INF);
  const vi lanes = iota();
  for (int64_t j = begin; j < end; j += W) {
    vf x = load(s + j) * rule.scale;
    if (rule.key_scales) x *= load(rule.key_scales + j);
    if (rule.softcap != 0) x = tanh(x * (1 / rule.softcap)) * rule.softcap;
    if (rule.slope != 0) x += __builtin_convertvector(lanes + (int32_t)(rule.distance + j), vf) * rule.slope;
    if (rule.mask) {
      vi seen;
      for (int i = 0; i < W; i++) seen[i] = j + i < end ? rule.mask[(j + i) * rule.mask_stride] : 0;
      x = seen != 0 ? x : splat(-INF);
    }
    if (j + W > end) x = lanes < (int32_t)(end - j) ? x : splat(-INF);
    store(s + j, x);
    highest = max(highest, x);
  }

  float before = state.max[row], now = max(highest);
  now = before > now ? before : now;
  float base = now == -INF ? 0 : now;
  vf total{};
  for (int64_t j = begin; j < end; j += W) {
    vf weight = exp(load(s + j) - base);
    total += weight;
    if (rule.value_scales) weight *= load(rule.value_scales + j);
    store(s + j, weight);
  }
  for (int64_t j = end; j < count; j++) s[j] = 0;
  float rescale = before == now ? 1 : before == -INF ? 0 : __builtin_expf(before - base);
  state.sum[row] = state.sum[row] * rescale + sum(total);
  state.max[row] = now;
  state.rescale[row] = rescale;
}

// Writes one row of the result, and its LSE, from the accumulated values, which it scales in place.
TCPORT_ONCE void finish_row(const Attention& a, int64_t token, int64_t head, float highest, float total,
                            float value_scale, float* accumulated) {
  if (a.sinks) {
    float sink = a.sinks[head], top = highest > sink ? highest : sink;
    float before = highest == -INF ? 0 : __builtin_expf(highest - top);
    total = total * before + (sink == -INF ? 0 : __builtin_expf(sink - top));
    value_scale *= before;
    highest = top;
  }
  const int64_t where = token * a.q_heads + head;
  if (a.lse) a.lse[where] = total == 0 ? -INF : highest + __builtin_logf(total);
  const float factor = total == 0 ? 0 : value_scale / total;
  for (int64_t d = 0; d < a.v.dim; d++) accumulated[d] *= factor;
  round_row(accumulated, a.v.dim, a.query.dtype, a.out, where * a.v.dim, 1);
}

}  // namespace tcport_cpu::TCPORT_ISA
