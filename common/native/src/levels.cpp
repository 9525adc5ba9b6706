// Which level of instructions this machine has, and what the library was built from.

#include "level.h"

KVASS_PUBLIC const char* kvass_sources() { return KVASS_SOURCES; }

// The best level that was compiled and that this machine runs.
KVASS_PUBLIC const char* kvass_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("x86-64-v3");
  const bool v4 = v3 && __builtin_cpu_supports("x86-64-v4");
  if (v4 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512bf16"))
    return "avx512bf16";
  if (v4) return "avx512";
  if (v3) return "avx2";
#endif
  return "portable";
}
