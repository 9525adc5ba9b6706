// Rounding the numbers of rows to codes one after the other: what a number loses is taken off those
// after it, times what a matrix says. By the rules of common/kernels/formats.py, bit for bit.
//
// The lanes are rows: 16 of them are rounded at once, each by the same operations as alone.

#pragma once

#include "paged.h"

namespace {

// Sixteen rows of one head, turned over: number i of row r is at [i][r].
struct Sixteen {
  alignas(64) float numbers[kHeadMax * kLanes];
  alignas(64) float scale[kHeadMax / 16 * kLanes], least[kHeadMax / 16 * kLanes];  // of each group
};

KVASS_INLINE Floats within(const Floats& x, float low, float high) {
  const Floats below = select(less(splat(high), x), splat(high), x);  // a NaN stays
  return select(less(below, splat(low)), splat(low), below);
}

// The nearest integers, ties to even, of numbers below 2**22.
KVASS_INLINE Floats nearest_integer(const Floats& x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2**23
  return (x + magic) - magic;
}

// The nearest values of e4m3, of numbers up to 448: with three bits after the first, and in steps of
// 2**-9 at least. Adding 1.5 * 2**20 times a number's power of two rounds so, ties to even.
KVASS_INLINE Floats nearest_e4m3(const Floats& x) {
  const Floats power = from_bits(bits_of(x) & splat_int(0x7f800000));
  const Floats magic = greater(power, splat(0x1p-6f)) * splat(0x1.8p20f);
  const Floats rounded = (x + magic) - magic;
  return from_bits(bits_of(rounded) | (bits_of(x) & splat_int(INT32_MIN)));  // -0 keeps its sign
}

template <Format format>
KVASS_INLINE Floats nearest(const Floats& ratio) {
  if constexpr (format == kFp8) return nearest_e4m3(within(ratio, -448.0f, 448.0f));
  if constexpr (format == kInt8) return nearest_integer(within(ratio, -127.0f, 127.0f));
  return nearest_integer(within(ratio, 0.0f, 15.0f));
}

// Replaces numbers by what their codes stand for, in units of their scales. `carry` [number][number]:
// of it the part right of the diagonal counts.
template <Format format>
void round_in_turn(Sixteen* rows, int64_t count, int64_t group, const float* carry) {
  for (int64_t i = 0; i < count; i++, carry += count) {
    const Floats number = load(rows->numbers + i * kLanes);
    const Floats scale = load(rows->scale + i / group * kLanes);
    const Floats least = load(rows->least + i / group * kLanes);
    const Floats ratio = nearest<format>((number - least) / scale);
    store(rows->numbers + i * kLanes, ratio);
    const Floats lost = number - (ratio * scale + least);
    for (int64_t j = i + 1; j < count; j++) {
      float* at = rows->numbers + j * kLanes;
      store(at, load(at) - lost * splat(carry[j]));
    }
  }
}

void round_in_turn(const Pool& pool, Sixteen* rows, const float* carry) {
  const int64_t count = pool.head_dim;
  if (pool.format == kFp8) round_in_turn<kFp8>(rows, count, count, carry);
  if (pool.format == kInt8) round_in_turn<kInt8>(rows, count, count, carry);
  if (pool.format == kInt4) round_in_turn<kInt4>(rows, count, code_group(count), carry);
}

}  // namespace
