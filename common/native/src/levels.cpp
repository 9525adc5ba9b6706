// Which level of instructions this machine has, and what the library was built from.

#include "level.h"

KVASS_PUBLIC const char* kvass_sources() { return KVASS_SOURCES; }

// The best level that was compiled and that this machine runs.
KVASS_PUBLIC const char* kvass_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512bf16"))
    return "avx512bf16";
  if (v4) return "avx512";
  if (v3) return "avx2";
#endif
  return "portable";
}
