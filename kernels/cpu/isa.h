// Which of the built kernels this processor can run.
#pragma once

#include "problem.h"

namespace tcport_cpu {

// The kernels in use: the best the processor runs, or what select_kernels chose.
const Kernels& kernels();

// Selects by name ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"; "" for the best). False: not built or not
// runnable.
bool select_kernels(const char* name);

}  // namespace tcport_cpu
