#include "isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tcport_cpu {

namespace baseline { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
namespace avx512_amx { extern const Kernels kernels; }
#endif

namespace {

#if defined(__x86_64__)
// Whether the processor multiplies tiles of bf16, and Linux, asked for it, lets this process use them. Sources: Intel
// 64 and IA-32 Architectures Software Developer's Manual, CPUID leaf 7; Linux, Documentation/arch/x86/xstate.rst.
bool has_tiles() {
#if defined(__linux__)
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

struct Choice {
  const Kernels* kernels;
  bool runnable;
};

const Choice* choices() {  // best first, ended by null
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  static const bool has_amx = has_bf16 && has_tiles();
  static const Choice list[] = {{&avx512_amx::kernels, has_amx},
                                {&avx512_bf16::kernels, has_bf16},
                                {&avx512::kernels, has_avx512},
                                {&avx2::kernels, has_avx2},
                                {&baseline::kernels, true},
                                {nullptr, false}};
#else
  static const Choice list[] = {{&baseline::kernels, true}, {nullptr, false}};
#endif
  return list;
}

const Kernels* find(const char* name) {
  for (const Choice* c = choices(); c->kernels; c++)
    if (c->runnable && (!*name || !std::strcmp(name, c->kernels->name))) return c->kernels;
  return nullptr;
}

std::atomic<const Kernels*> selected{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* current = selected.load(std::memory_order_relaxed);
  if (!current) selected.store(current = find(""), std::memory_order_relaxed);
  return *current;
}

bool select_kernels(const char* name) {
  const Kernels* found = find(name);
  if (found) selected.store(found, std::memory_order_relaxed);
  return found != nullptr;
}

}  // namespace tcport_cpu
