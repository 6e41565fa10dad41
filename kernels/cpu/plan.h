// How the work of one attention call is cut into tasks, from the lengths of its sequences.
#pragma once

#include <vector>

#include "problem.h"

namespace tcport_cpu {

struct Plan {
  std::vector<Task> tasks;
  std::vector<Join> joins;
  int64_t partial_floats = 0;
};

// Tasks over all sequences. Pieces of the keys begin at multiples of the piece, so that what a row is computed from, and
// in which order, depends on its own sequence alone: neither the batch nor the number of threads changes a bit.
//
// Args:
//   splits: into how many pieces each row's keys go; 0: pieces of `tile.piece` keys.
//   threads: how many should find work; where the batch is small, a task takes fewer heads.
//
// Sets `tile.heads`. Throws where a table entry that will be read is not a page of the cache.
Plan plan_tasks(Attention& a, const std::vector<Sequence>& sequences, int64_t splits, int64_t threads,
                const Kernels& kernels);

}  // namespace tcport_cpu
