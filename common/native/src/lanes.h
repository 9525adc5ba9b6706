// Sixteen float32 numbers at once, by the same rules on every machine.
//
// A level has one register for them, two or four. Each operation rounds each lane by itself, products
// and sums are fused where `fused` says so and nowhere else (setup.py compiles who includes this so),
// and sums over lanes have a fixed order: so all levels give the same bits. The exceptions are x86
// without FMA (`portable` there), which rounds a product before it adds, and products of bf16 numbers
// (pairs.h).

#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "level.h"

#define KVASS_UNROLL _Pragma("GCC unroll 32")

namespace {

#if defined(__AVX512F__)
constexpr int kPart = 16;
#elif defined(__AVX2__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
constexpr int kLanes = 16, kParts = kLanes / kPart;

typedef float Part __attribute__((vector_size(4 * kPart)));
typedef int32_t PartInts __attribute__((vector_size(4 * kPart)));
typedef uint32_t PartWords __attribute__((vector_size(4 * kPart)));

struct Floats {
  Part part[kParts];
};
struct Ints {
  PartInts part[kParts];
};

KVASS_INLINE Part fused_part(Part a, Part b, Part c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

#define KVASS_EACH(expression)                                            \
  {                                                                       \
    KVASS_UNROLL for (int i = 0; i < kParts; i++) out.part[i] = expression; \
    return out;                                                           \
  }

KVASS_INLINE Floats load(const float* at) {
  Floats out;
  KVASS_UNROLL for (int i = 0; i < kParts; i++) memcpy(&out.part[i], at + i * kPart, sizeof(Part));
  return out;
}
KVASS_INLINE void store(float* at, const Floats& x) {
  KVASS_UNROLL for (int i = 0; i < kParts; i++) memcpy(at + i * kPart, &x.part[i], sizeof(Part));
}
KVASS_INLINE Floats splat(float x) {
  Floats out;
  KVASS_EACH(x - Part{})  // x - 0 is x, -0 too
}
// a * b + c, rounded once.
KVASS_INLINE Floats fused(const Floats& a, const Floats& b, const Floats& c) {
  Floats out;
  KVASS_EACH(fused_part(a.part[i], b.part[i], c.part[i]))
}
KVASS_INLINE Floats operator+(const Floats& a, const Floats& b) {
  Floats out;
  KVASS_EACH(a.part[i] + b.part[i])
}
KVASS_INLINE Floats operator-(const Floats& a, const Floats& b) {
  Floats out;
  KVASS_EACH(a.part[i] - b.part[i])
}
KVASS_INLINE Floats operator*(const Floats& a, const Floats& b) {
  Floats out;
  KVASS_EACH(a.part[i] * b.part[i])
}
KVASS_INLINE Floats operator/(const Floats& a, const Floats& b) {
  Floats out;
  KVASS_EACH(a.part[i] / b.part[i])
}
// The greater; b where a is NaN.
KVASS_INLINE Floats greater(const Floats& a, const Floats& b) {
  Floats out;
  KVASS_EACH(a.part[i] > b.part[i] ? a.part[i] : b.part[i])
}
// All bits where a < b, else none.
KVASS_INLINE Ints less(const Floats& a, const Floats& b) {
  Ints out;
  KVASS_EACH(a.part[i] < b.part[i])
}
KVASS_INLINE Floats select(const Ints& where, const Floats& a, const Floats& b) {
  Floats out;
  KVASS_EACH(where.part[i] ? a.part[i] : b.part[i])
}
KVASS_INLINE Ints bits_of(const Floats& x) {
  Ints out;
  KVASS_EACH((PartInts)x.part[i])
}
KVASS_INLINE Floats from_bits(const Ints& x) {
  Floats out;
  KVASS_EACH((Part)x.part[i])
}
KVASS_INLINE Ints operator+(const Ints& a, const Ints& b) {
  Ints out;
  // Unsigned: what exceeds 31 bits is thrown away by who adds it.
  KVASS_EACH((PartInts)((PartWords)a.part[i] + (PartWords)b.part[i]))
}
KVASS_INLINE Ints operator&(const Ints& a, const Ints& b) {
  Ints out;
  KVASS_EACH(a.part[i] & b.part[i])
}
KVASS_INLINE Ints operator<<(const Ints& a, int count) {
  Ints out;
  KVASS_EACH(a.part[i] << count)
}
KVASS_INLINE Ints operator<(const Ints& a, const Ints& b) {
  Ints out;
  KVASS_EACH(a.part[i] < b.part[i])
}
KVASS_INLINE Ints splat_int(int32_t x) {
  Ints out;
  KVASS_EACH(x - PartInts{})
}
// first, first + 1, …
KVASS_INLINE Ints count_from(int32_t first) {
  Ints out;
  KVASS_UNROLL for (int i = 0; i < kLanes; i++) out.part[i / kPart][i % kPart] = first + i;
  return out;
}

// The greatest lane: exact, so that its order is nobody's business.
KVASS_INLINE float greatest(const Floats& x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x.part[0]);
#else
  Part most = x.part[0];
  for (int i = 1; i < kParts; i++) most = x.part[i] > most ? x.part[i] : most;
  float found = most[0];
  for (int i = 1; i < kPart; i++) found = most[i] > found ? most[i] : found;
  return found;
#endif
}

// The sum of all lanes: halves are added to halves.
KVASS_INLINE float total(const Floats& x) {
  float lane[kLanes];
  store(lane, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

// 2**x for x <= 0, exactly 1 for 0, and 0 below -126. The polynomial is a minimax one of the relative
// error on [-1/2, 1/2] (2e-9 before rounding), so results are within 1.2 units in the last place.
KVASS_INLINE Floats power_of_two(const Floats& x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
  const Floats rounded = x + magic;
  const Floats rest = x - (rounded - magic);
  Floats value = splat(0x1.41fbbcp-13f);
  value = fused(value, rest, splat(0x1.5f3e54p-10f));
  value = fused(value, rest, splat(0x1.3b2d4cp-7f));
  value = fused(value, rest, splat(0x1.c6aee8p-5f));
  value = fused(value, rest, splat(0x1.ebfbdcp-3f));
  value = fused(value, rest, splat(0x1.62e430p-1f));
  value = fused(value, rest, splat(1.0f));
  const Floats scaled = from_bits(bits_of(value) + (bits_of(rounded) << 23));
  return select(less(x, splat(-126.0f)), splat(0.0f), scaled);
}

KVASS_INLINE float power_of_two(float x) { return power_of_two(splat(x)).part[0][0]; }

// tanh by 2**x, within 1e-7 of it.
KVASS_INLINE Floats tanh_of(const Floats& x) {
  const Floats size = greater(x, splat(0.0f) - x);
  const Floats power = power_of_two(size * splat(-2.8853900817779268f));  // -2 / ln 2
  const Floats value = (splat(1.0f) - power) / (splat(1.0f) + power);
  return select(less(x, splat(0.0f)), splat(0.0f) - value, value);
}

}  // namespace
