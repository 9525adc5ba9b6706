// Heads on their way into a pool and to attention: read where a product left them, turned, rotated.

#pragma once

#include "codes.h"
#include "heads.h"
#include "pool.h"

namespace {

constexpr int64_t kHeadMax = 256;

// Reads a head and turns it by its row's position: channel i with channel i + D / 2. Products and sums
// are rounded one by one, as torch does (common/kernels/turn.py).
void read_head(const Rows& rows, int64_t row, int64_t head, int64_t head_dim, const Turn* turn,
               float* out) {
  const int64_t start = row * rows.step + head * head_dim;
  if (rows.is_bf16) {
    const auto* from = static_cast<const unsigned char*>(rows.data) + 2 * start;
    for (int64_t i = 0; i < head_dim; i += kLanes) store(out + i, Codes<kBf16>::decode(from + 2 * i));
  } else {
    memcpy(out, static_cast<const float*>(rows.data) + start, 4 * head_dim);
  }
  if (turn == nullptr) return;
  const int64_t half = head_dim / 2;
  const float* cosine = turn->cosine + row * half;
  const float* sine = turn->sine + row * half;
  for (int64_t i = 0; i < half; i++) {
    const float low = out[i], high = out[i + half];
    out[i] = low * cosine[i] - high * sine[i];
    out[i + half] = high * cosine[i] + low * sine[i];
  }
}

// One stage of the transform within parts: every lane with the lane `distance` away.
template <int distance>
KVASS_INLINE Part butterfly(Part x) {
  PartInts other;
  Part sign;
  KVASS_UNROLL for (int i = 0; i < kPart; i++) {
    other[i] = i ^ distance;
    sign[i] = i & distance ? -1.0f : 1.0f;
  }
  return __builtin_shuffle(x, other) + x * sign;
}

// Multiplies by the block-diagonal Hadamard matrix with blocks of `width` (a power of two, at least
// 16): a fast Walsh-Hadamard transform, neighbours first, then by 1 / sqrt(width).
void rotate(float* head, int64_t head_dim, int64_t width) {
  const Part factor = 1.0f / __builtin_sqrtf(static_cast<float>(width)) - Part{};
  Part parts[kHeadMax / kPart];
  const int64_t count = head_dim / kPart, wide = width / kPart;
  for (int64_t i = 0; i < count; i++) {
    memcpy(&parts[i], head + i * kPart, sizeof(Part));
    parts[i] = butterfly<2>(butterfly<1>(parts[i]));
    if constexpr (kPart >= 8) parts[i] = butterfly<4>(parts[i]);
    if constexpr (kPart >= 16) parts[i] = butterfly<8>(parts[i]);
  }
  for (int64_t distance = 1; distance < wide; distance *= 2)
    for (int64_t i = 0; i < count; i++)
      if (!(i & distance)) {
        const Part low = parts[i], high = parts[i + distance];
        parts[i] = low + high;
        parts[i + distance] = low - high;
      }
  for (int64_t i = 0; i < count; i++) {
    parts[i] *= factor;
    memcpy(head + i * kPart, &parts[i], sizeof(Part));
  }
}

}  // namespace
