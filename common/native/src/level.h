// What a source that is compiled once a level (setup.py) needs to know of it.
//
// Such a source includes no header of the standard library that holds templates or inline functions,
// but <cstdint>, <cstring>, <cmath>'s built-ins and <immintrin.h>: the linker keeps one copy of an
// inline function, and it might be the one with instructions that the machine does not have. What
// it defines is static, in a namespace without a name, or exported as KVASS_PUBLIC type KVASS_AT(kvass_name).

#pragma once

#include <cstddef>
#include <cstdint>

#define KVASS_JOIN_(a, b) a##_##b
#define KVASS_JOIN(a, b) KVASS_JOIN_(a, b)
// kvass_copy at level avx2 is the symbol kvass_copy_avx2; library.py finds it by its level.
#define KVASS_AT(name) KVASS_JOIN(name, KVASS_LEVEL)
#define KVASS_PUBLIC extern "C" __attribute__((visibility("default")))
#define KVASS_INLINE inline __attribute__((always_inline))
