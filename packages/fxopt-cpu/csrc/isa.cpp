// Which table this processor takes. A unit is entered only where the processor and the operating system (XCR0: the
// registers are saved) have every flag that the unit is compiled with.
#include "kernels.h"

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512vnni_kernels, avx512bf16_kernels;
#endif

namespace {

const Kernels* chosen = &portable_kernels;

int highest() {
#if defined(__x86_64__)
  __builtin_cpu_init();  // the compiler's own reading of CPUID, which asks XGETBV too
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return 1;
  if (!__builtin_cpu_supports("avx512vnni")) return 2;
  return __builtin_cpu_supports("avx512bf16") ? 4 : 3;
#else
  return 0;
#endif
}

}  // namespace

const Kernels& kernels() { return *chosen; }

extern "C" int fxopt_limit_kernels(int limit) {
  const int best = highest(), level = limit < best ? limit : best;
#if defined(__x86_64__)
  const Kernels* all[] = {&portable_kernels, &avx2_kernels, &avx512_kernels, &avx512vnni_kernels, &avx512bf16_kernels};
  chosen = all[level < 0 ? 0 : level];
#endif
  return level;
}
