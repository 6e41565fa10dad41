#include "run.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#include "isa.h"
#include "plan.h"

namespace tcport_cpu {
namespace {

constexpr int64_t BYPASS_BYTES = int64_t{16} << 20;  // more than a core can expect to keep in the shared cache
constexpr int64_t SERIAL_WORK = 1 << 15;  // element reads (or bytes written) under which waking a thread costs more

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float, Free>;

Floats allocate(int64_t floats) {
  void* p = std::aligned_alloc(64, static_cast<size_t>((floats * 4 + 63) / 64 * 64 + 64));
  if (!p) throw std::bad_alloc();
  return Floats(static_cast<float*>(p));
}

// Memory of this thread for the length of a task, kept for the next call: a fresh allocation would be page faults.
float* thread_scratch(int64_t floats) {
  thread_local Floats memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    memory.reset();
    size = 0;
    memory = allocate(floats);
    size = floats;
  }
  return memory.get();
}

template <class F>
void for_threads(int64_t work_items, bool serial, const F& f) {
  const int64_t threads = serial ? 1 : std::min<int64_t>(torch::stable::get_num_threads(), work_items);
  if (threads <= 1)
    f();
  else
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { f(); });
}

}  // namespace

void run_attention(Attention& a, const std::vector<Sequence>& sequences, int64_t tokens, int64_t splits) {
  const Kernels& k = kernels();
  std::vector<bool> covered(static_cast<size_t>(tokens), false);
  for (const Sequence& s : sequences)
    for (int64_t i = 0; i < s.query_len; i++) covered[static_cast<size_t>(s.first_token + i)] = true;
  for (int64_t i = 0; i < tokens; i++)
    if (!covered[static_cast<size_t>(i)]) k.clear(a, i);

  a.sequences = sequences.data();
  Plan plan = plan_tasks(a, sequences, splits, torch::stable::get_num_threads(), k);
  Floats partials = allocate(plan.partial_floats);
  a.partials = partials.get();
  const int64_t scratch = k.scratch_floats(a);
  int64_t work = 0;
  for (const Task& t : plan.tasks)
    work += (t.key_end - t.key_begin) * (t.head_end - t.head_begin) * (t.row_end - t.row_begin) * (a.k.dim + a.v.dim);

  // Threads take the next task as they become free: a core that others use too slows only its own task.
  std::atomic<size_t> next{0};
  for_threads(static_cast<int64_t>(plan.tasks.size()), work < SERIAL_WORK, [&] {
    float* memory = thread_scratch(scratch);
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < plan.tasks.size();) {
      const Task& task = plan.tasks[i];
      k.attend(a, task, memory);
      if (task.join < 0) continue;
      Join& join = plan.joins[static_cast<size_t>(task.join)];
      if (__atomic_add_fetch(&join.done, 1, __ATOMIC_ACQ_REL) == join.pieces) k.join(a, task, join);
    }
  });
}

void run_write(Write& w, int64_t tokens) {
  const Kernels& k = kernels();
  const int64_t bytes = tokens * w.kv_heads * (w.k.dim + w.v.dim) * size_of(w.k.dtype);
  w.bypass_cache = bytes > BYPASS_BYTES;
  if (bytes < SERIAL_WORK) return k.write(w, 0, tokens);
  torch::stable::parallel_for(0, tokens, 1, [&](int64_t begin, int64_t end) { k.write(w, begin, end); });
}

}  // namespace tcport_cpu
