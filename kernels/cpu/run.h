// Carries out a call on torch's own threads.
#pragma once

#include <vector>

#include "problem.h"

namespace tcport_cpu {

// Every token of no sequence gets zeros and the LSE of no key.
void run_attention(Attention& a, const std::vector<Sequence>& sequences, int64_t tokens, int64_t splits);
void run_write(Write& w, int64_t tokens);

}  // namespace tcport_cpu
