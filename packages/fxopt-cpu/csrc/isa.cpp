// Which table this processor takes. A unit is entered only where the processor and the operating system (XCR0: the
// registers are saved) have every flag that the unit is compiled with.
#if defined(FXOPT_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512vnni_kernels, avx512bf16_kernels;
#if defined(FXOPT_AVXVNNI)
extern const Kernels avxvnni_kernels;
#endif
#if defined(FXOPT_AMX)
extern const Kernels amx_kernels;
#endif
#endif

namespace {

#if defined(FXOPT_AMX)
// Linux saves the registers of tiles for programs that ask: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#endif

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
  if (!__builtin_cpu_supports("avx512bf16")) return nullptr;
  if (level == 5) return &avx512bf16_kernels;
#if defined(FXOPT_AMX)
  if (__builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") && may_use_tiles()) return &amx_kernels;
#endif
  return nullptr;
#else
  return nullptr;
#endif
}

}  // namespace

const Kernels& kernels() { return *chosen; }

extern "C" int fxopt_limit_kernels(int limit) {
  int level = limit < 6 ? limit : 6;
  while (!table(level)) --level;
#if defined(__x86_64__)
  if (level == 5 && limit > 5 && __builtin_cpu_is("intel")) level = 4;  // vdpbf16ps is half as fast as products of floats
#endif
  chosen = table(level);
  return level < 0 ? 0 : level;
}
