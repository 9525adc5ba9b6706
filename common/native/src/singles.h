// Units of one float32 number: products and sums are float32, each rounded once.

#pragma once

#include "codes.h"

namespace {

typedef float Unit;
typedef Floats Units;
constexpr int kUnit = 1;  // numbers

// How numbers are kept as units.
KVASS_INLINE void keep(const float* numbers, int64_t count, Unit* out) {
  memcpy(out, numbers, 4 * count);
}

// What a tile's values are multiplied by.
struct ValueScales {
  alignas(64) float scale[kTile];
  void finish(int64_t) {}
};

constexpr int kRoundRows = 6;  // query heads whose weights are computed together, at most

// Lines of the next tile that a product asks for a step; here tiles ask for all as they decode.
template <class Code>
constexpr int kAsks = 0;

// Raises the greatest scores of `count` query heads to `most`; `kept` is 2**(the old one - the new).
KVASS_INLINE void raise(Floats* most, int64_t count, float* greatest_so_far, float* kept) {
  for (int64_t i = 0; i < count; i++) {
    const float before = greatest_so_far[i], now = greatest(most[i]);
    greatest_so_far[i] = now > before ? now : before;
    kept[i] = power_of_two(before - greatest_so_far[i]);
  }
}

// Turns one query head's scores into weights for values; `most` is as great as any of them. Adds the
// weights' sum to `lanes`.
template <bool has_scales>
KVASS_INLINE Floats weights_of(const float* scores, int64_t strips, float most,
                               const ValueScales& values, Floats lanes, Unit* out) {
  KVASS_UNROLL for (int i = 0; i < kStrips; i++) {
    if (i >= strips) break;
    const Floats weight = power_of_two(load(scores + i * kLanes) - splat(most));
    lanes = lanes + weight;
    if constexpr (has_scales)
      store(out + i * kLanes, weight * load(values.scale + i * kLanes));
    else
      store(out + i * kLanes, weight);
  }
  return lanes;
}

}  // namespace
