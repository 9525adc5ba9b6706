// A paged pool and one step over it, as Python hands them over (common/kernels/native_paged.py holds
// the same structures), and heads on their way into and out of attention: rope and rotation.

#pragma once

#include "codes.h"

namespace {

constexpr int64_t kHeadMax = 256;

// Sizes and distances in bytes, from `BlockLayout`. `rotation` is the width of a block of the Hadamard
// matrix, `key_rotated` and `value_rotated` say what is stored rotated. `window` is how many positions
// a row attends to, its own the last, and `soft_cap` bounds scores by cap * tanh(score / cap); 0: off.
struct Pool {
  unsigned char* memory;
  int64_t block_size, group_size, layer_size, record_size, codes_size;
  int64_t block_tokens, head_dim, kv_heads, group_heads, query_heads;
  int64_t format, rotation, key_rotated, value_rotated;
  int64_t window;
  double soft_cap;
};

// Where a KV head's numbers are in every slot: offsets from the slot's start.
struct Place {
  int64_t codes[2], scales[2];  // K, V
};

KVASS_INLINE Place place_of(const Pool& pool, int64_t layer, int64_t head, int64_t code_bytes) {
  const int64_t inner = head % pool.group_heads;
  Place place;
  for (int value = 0; value < 2; value++) {
    const int64_t record = head / pool.group_heads * pool.group_size + layer * pool.layer_size +
                           value * pool.record_size;
    place.codes[value] = record + inner * pool.block_tokens * pool.head_dim * code_bytes;
    place.scales[value] = record + pool.codes_size + inner * pool.block_tokens * 2;
  }
  return place;
}

// Rows of heads, float32 or bf16; `step` numbers from one row to the next.
struct Rows {
  const void* data;
  int64_t step;
  int64_t is_bf16;
};

// Cosine and sine [rows, head_dim / 2] of rows' positions; none where rows are turned already.
struct Turn {
  const float* cosine;
  const float* sine;
};

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
  memcpy(parts, head, 4 * head_dim);
  const int64_t count = head_dim / kPart, wide = width / kPart;
  for (int64_t i = 0; i < count; i++) {
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
  for (int64_t i = 0; i < count; i++) parts[i] *= factor;
  memcpy(head, parts, 4 * head_dim);
}

}  // namespace
