// Which table this processor takes. A unit is entered only where the processor and the operating system (XCR0: the
// registers are saved) have every flag that the unit is compiled with.
#include "kernels.h"

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512vnni_kernels, avx512bf16_kernels;
#if defined(FXOPT_AVXVNNI)
extern const Kernels avxvnni_kernels;
#endif
#endif

namespace {

const Kernels* chosen = &portable_kernels;

// The table of a level, or null where this processor or this compiler does not have it.
const Kernels* table(int level) {
  if (level <= 0) return &portable_kernels;
#if defined(__x86_64__)
  __builtin_cpu_init();  // the compiler's own reading of CPUID, which asks XGETBV too
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return nullptr;
  if (level == 1) return &avx2_kernels;
#if defined(FXOPT_AVXVNNI)
  if (level == 2) return __builtin_cpu_supports("avxvnni") ? &avxvnni_kernels : nullptr;
#endif
  if (level == 2 || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return nullptr;
  if (level == 3) return &avx512_kernels;
  if (!__builtin_cpu_supports("avx512vnni")) return nullptr;
  if (level == 4) return &avx512vnni_kernels;
  return __builtin_cpu_supports("avx512bf16") ? &avx512bf16_kernels : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace

const Kernels& kernels() { return *chosen; }

extern "C" int fxopt_limit_kernels(int limit) {
  int level = limit < 5 ? limit : 5;
  while (!table(level)) --level;
  chosen = table(level);
  return level < 0 ? 0 : level;
}
