// One translation unit per instruction set: TCPORT_ISA names it, the compiler's flags make it.
#include "stream_task.h"
#include "matrix_task.h"
#include "write.h"

namespace tcport_cpu::TCPORT_ISA {

static int64_t scratch_floats(const Attention& a) {
  Arena stream{nullptr}, matrix{nullptr};
  StreamScratch(a, a.tile.stream_rows, a.tile.heads, stream);
  MatrixScratch(a, matrix);
  return stream.used > matrix.used ? stream.used : matrix.used;
}

static void attend(const Attention& a, const Task& task, float* scratch) {
  if (task.row_end - task.row_begin <= a.tile.stream_rows)
    stream_task(a, task, scratch);
  else
    matrix_task(a, task, scratch);
}

// Merges the pieces of a set of rows into the first of them, in order, and finishes the rows.
static void join(const Attention& a, const Task& task, const Join& join) {
  const int64_t rows = task.row_end - task.row_begin, dim = round_up(a.v.dim, W), size = partial_floats(a, rows);
  const int64_t heads = task.head_end - task.head_begin;
  for (int64_t h = 0; h < heads; h++) {
    float* first = a.partials + join.partial + h * size;
    for (int64_t r = 0; r < rows; r++) {
      float highest = -INF, total = 0;
      for (int64_t i = 0; i < join.pieces; i++) {
        float m = first[i * heads * size + rows * dim + r];
        highest = highest > m ? highest : m;
      }
      for (int64_t i = 0; i < join.pieces; i++) {
        float* piece = first + i * heads * size;
        float m = piece[rows * dim + r];
        float factor = m == -INF ? 0 : __builtin_expf(m - highest);
        total += piece[rows * (dim + 1) + r] * factor;
        for (int64_t d = 0; d < dim; d += W) {
          vf before = i == 0 ? vf{} : load(first + r * dim + d);
          store(first + r * dim + d, before + load(piece + r * dim + d) * factor);
        }
      }
      first[rows * dim + r] = highest;
      first[rows * (dim + 1) + r] = total;
    }
    RowState state{first + rows * dim, first + rows * (dim + 1), nullptr};
    RowIndex index{a, a.sequences[task.sequence], task.row_begin, task.head_begin + h};
    finish_rows(index, rows, state, 1, first, dim);
  }
}

static void clear(const Attention& a, int64_t token) {
  float none[1] = {0};
  for (int64_t head = 0; head < a.q_heads; head++) {
    for (int64_t d = 0; d < a.v.dim; d++)
      round_row(none, 1, a.query.dtype, a.out, (token * a.q_heads + head) * a.v.dim + d, 1);
    if (a.lse) a.lse[token * a.q_heads + head] = a.sinks ? a.sinks[head] : -INF;
  }
}

#define TCPORT_STRING_(x) #x
#define TCPORT_STRING(x) TCPORT_STRING_(x)

extern const Kernels kernels;
const Kernels kernels = {TCPORT_STRING(TCPORT_ISA), scratch_floats, partial_floats, attend, join, write, clear, value};

}  // namespace tcport_cpu::TCPORT_ISA
