#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tcport_cpu {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Throws where a page that some token sees is not one of the cache. A mask may hide all of a page, which then may be
// padding: it is read as the nearest page there is.
void check_pages(const Attention& a, int64_t table_row, Range keys) {
  if (a.mask && a.num_pages > 0) return;
  for (int64_t i = keys.begin / a.page_size; i * a.page_size < keys.end; i++) {
    const int64_t page = a.table.at(table_row, i);
    if (page < 0 || page >= a.num_pages)
      throw std::runtime_error("block_table[" + std::to_string(table_row) + ", " + std::to_string(i) + "] is " +
                               std::to_string(page) + ", and the cache has pages 0 to " +
                               std::to_string(a.num_pages - 1));
  }
}

// The tasks of one set of rows over `heads` KV heads.
void plan_rows(const Attention& a, Task task, Range keys, int64_t piece, int64_t first_boundary, const Kernels& kernels,
               Plan& plan) {
  std::vector<int64_t> ends;
  for (int64_t end = first_boundary; end < keys.end; end += piece) ends.push_back(end);
  ends.push_back(keys.end);
  const int64_t pieces = static_cast<int64_t>(ends.size());
  const int64_t rows = task.row_end - task.row_begin, heads = task.head_end - task.head_begin;
  task.partial = task.join = -1;
  int64_t piece_floats = 0;
  if (pieces > 1) {
    piece_floats = heads * kernels.partial_floats(a, rows);
    task.join = static_cast<int64_t>(plan.joins.size());
    task.partial = plan.partial_floats;
    plan.joins.push_back({pieces, task.partial, 0});
    plan.partial_floats += pieces * piece_floats;
  }
  task.key_begin = keys.begin;
  for (int64_t end : ends) {
    task.key_end = end;
    plan.tasks.push_back(task);
    task.key_begin = end;
    task.partial += piece_floats;
  }
}

// KV heads per task of few rows: all, unless that leaves too few tasks. The heads of a page are neighbours in memory, in
// either layout, and read one after the other they share what it costs to find the page: entries of the page tables.
int64_t heads_per_task(const Attention& a, const std::vector<Sequence>& sequences, int64_t threads) {
  int64_t pieces = 0;
  for (const Sequence& s : sequences) pieces += ceil_div(s.length, a.tile.piece);
  int64_t heads = a.kv_heads;
  while (heads > 1 && pieces * ceil_div(a.kv_heads, heads) < 8 * threads) heads = ceil_div(heads, 2);
  return heads;
}

}  // namespace

Plan plan_tasks(Attention& a, const std::vector<Sequence>& sequences, int64_t splits, int64_t threads,
                const Kernels& kernels) {
  Plan plan;
  a.tile.heads = heads_per_task(a, sequences, threads);
  for (size_t s = 0; s < sequences.size(); s++) {
    const Sequence& sequence = sequences[s];
    const int64_t all_rows = sequence.query_len * a.group, first = sequence.length - sequence.query_len;
    const bool few = all_rows <= a.tile.stream_rows;
    const int64_t rows = few ? all_rows : a.tile.rows, heads = few ? a.tile.heads : 1;
    check_pages(a, sequence.table_row, {visible(a, first, sequence.length).begin,
                                        visible(a, sequence.length - 1, sequence.length).end});
    for (int64_t row = 0; row < all_rows; row += rows) {
      Task task{};
      task.sequence = static_cast<int64_t>(s);
      task.row_begin = row;
      task.row_end = std::min(row + rows, all_rows);
      Range keys{visible(a, first + row / a.group, sequence.length).begin,
                 visible(a, first + (task.row_end - 1) / a.group, sequence.length).end};
      keys.end = std::max(keys.begin, keys.end);
      int64_t piece = few ? a.tile.piece : 4 * a.tile.piece;
      int64_t boundary = (keys.begin / piece + 1) * piece;
      if (splits > 0) {
        piece = std::max<int64_t>(1, ceil_div(keys.end - keys.begin, splits));
        boundary = keys.begin + piece;
      }
      for (int64_t head = 0; head < a.kv_heads; head += heads) {
        task.head_begin = head;
        task.head_end = std::min(head + heads, a.kv_heads);
        plan_rows(a, task, keys, piece, boundary, kernels, plan);
      }
    }
  }
  // Long tasks first: whichever thread is free takes the next, and the last ones to run should be short.
  auto cost = [](const Task& t) { return (t.row_end - t.row_begin) * (t.key_end - t.key_begin); };
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [&](const Task& x, const Task& y) { return cost(x) > cost(y); });
  return plan;
}

}  // namespace tcport_cpu
