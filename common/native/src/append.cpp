// Quantising new K and V and storing them in a paged pool.
//
// The rules are those of common/kernels/formats.py, bit for bit: a row's largest magnitude meets the
// largest code, its scale is bf16, codes are computed with the rounded scale, round to even, saturate.

#include "paged.h"
#include "threads.h"

namespace {

constexpr int64_t kRowsAShare = 8;

struct Appending {
  const Pool* pool;
  int64_t layer, count;
  Rows rows[2];  // K, V
  const Turn* turn;
  const int64_t* slots;
  const int64_t* offsets;
};

int32_t bits_of(float value) {
  int32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// Rounds to bf16, ties to even; a NaN stays one.
uint16_t bf16_bits(float value) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(value));
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// 1 for rows of equal numbers, or so near to each other that their scale is 0.
uint16_t scale_or_one(uint16_t bits) { return bf16_value(bits) <= 0 ? 0x3f80 : bits; }

// Returns a row's scale. As integers, magnitudes are in order and NaN is above all.
uint16_t scale_of(const float* row, int64_t count, float code_max) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t size = bits_of(row[i]) & 0x7fffffff;
    most = size > most ? size : most;
  }
  float value;
  memcpy(&value, &most, 4);
  return scale_or_one(bf16_bits(value / code_max));
}

float clamped(float value, float most) {
  value = value > most ? most : value;
  return value < -most ? -most : value;
}

// The e4m3 code of a number of at most 448.
unsigned char e4m3_code(float value) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(value)), size = bits & 0x7fffffff;
  // From 2**-6: three bits of the significand stay, and the exponent's bias is 7, not 127.
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  // Below: multiples of 2**-9, which adding 2**14 rounds to.
  float magnitude;
  memcpy(&magnitude, &size, 4);
  const uint32_t small = static_cast<uint32_t>(bits_of(magnitude + 16384.0f) - bits_of(16384.0f));
  uint32_t code = size < (121u << 23) ? small : normal;
  code = size > 0x7f800000 ? 0x7f : code;
  return static_cast<unsigned char>(code | (bits >> 24 & 0x80));
}

// Stores one head's numbers as int4; a part of its scales is `step` bytes from the next.
void quantise_groups(const float* row, int64_t count, unsigned char* codes, unsigned char* scale_at,
                     int64_t step) {
  const int64_t group = code_group(count), groups = count / group;
  for (int64_t of = 0; of < groups; of++, row += group, codes += group / 2) {
    float least = row[0], most = row[0];
    for (int64_t i = 0; i < group; i++) {
      // A NaN, once met, stays.
      if (!(row[i] >= least) && least == least) least = row[i];
      if (!(row[i] <= most) && most == most) most = row[i];
    }
    const uint16_t least_bits = bf16_bits(least + 0.0f);  // -0 becomes 0
    const float low = bf16_value(least_bits);
    const uint16_t scale_bits = scale_or_one(bf16_bits((most - low) / 15.0f));
    memcpy(scale_at + of * step, &scale_bits, 2);
    memcpy(scale_at + (groups + of) * step, &least_bits, 2);
    const float scale = bf16_value(scale_bits);
    for (int64_t i = 0; i < group; i += 2) {
      int32_t pair[2];
      for (int half = 0; half < 2; half++) {
        const float ratio = (row[i + half] - low) / scale;
        const float kept = ratio > 15.0f ? 15.0f : ratio < 0.0f ? 0.0f : ratio;
        pair[half] = bits_of(kept + 12582912.0f) & 15;
      }
      codes[i / 2] = static_cast<unsigned char>(pair[0] | pair[1] << 4);
    }
  }
}

// Stores one head's numbers.
void quantise(const Pool& pool, const float* row, unsigned char* codes, unsigned char* scale_at) {
  const int64_t count = pool.head_dim;
  if (pool.format == kInt4)
    return quantise_groups(row, count, codes, scale_at, pool.block_tokens * 2);
  if (pool.format == kBf16) {
    for (int64_t i = 0; i < count; i++) {
      const uint16_t bits = bf16_bits(row[i]);
      memcpy(codes + 2 * i, &bits, 2);
    }
    return;
  }
  const float code_max = pool.format == kFp8 ? 448.0f : 127.0f;
  const uint16_t bits = scale_of(row, count, code_max);
  memcpy(scale_at, &bits, 2);
  const float scale = bf16_value(bits);
  if (pool.format == kFp8) {
    for (int64_t i = 0; i < count; i++) codes[i] = e4m3_code(clamped(row[i] / scale, code_max));
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    // Adding 1.5 * 2**23 rounds to an integer, ties to even.
    const float rounded = clamped(row[i] / scale, code_max) + 12582912.0f;
    codes[i] = static_cast<unsigned char>(bits_of(rounded));
  }
}

void subtract(const Pool& pool, int64_t layer, int64_t head, float* numbers) {
  const float* offsets = pool.key_offsets + (layer * pool.kv_heads + head) * pool.head_dim;
  for (int64_t i = 0; i < pool.head_dim; i++) numbers[i] -= offsets[i];
}

void append_row(const Appending& work, int64_t row) {
  const Pool& pool = *work.pool;
  const int64_t offset = work.offsets[row];
  unsigned char* slot = pool.memory + work.slots[row] * pool.block_size;
  alignas(64) float numbers[kHeadMax];
  for (int64_t head = 0; head < pool.kv_heads; head++) {
    const Place place = place_of(pool, work.layer, head);
    for (int value = 0; value < 2; value++) {
      read_head(work.rows[value], row, head, pool.head_dim, value ? nullptr : work.turn, numbers);
      if (!value && pool.key_offsets != nullptr) subtract(pool, work.layer, head, numbers);
      if (value ? pool.value_rotated : pool.key_rotated)
        rotate(numbers, pool.head_dim, pool.rotation);
      quantise(pool, numbers, slot + place.codes[value] + offset * pool.row_size,
               slot + place.scales[value] + 2 * offset);
    }
  }
}

void append_share(void* context, int64_t part) {
  const Appending& work = *static_cast<const Appending*>(context);
  const int64_t stop = (part + 1) * kRowsAShare;
  for (int64_t row = part * kRowsAShare; row < stop && row < work.count; row++)
    append_row(work, row);
}

}  // namespace

// Stores K and V [count, KV heads, head_dim] of one layer at token `offsets` of `slots`. `turn`: null
// where K is turned by its positions already.
KVASS_PUBLIC void KVASS_AT(kvass_append)(const Pool* pool, int64_t layer, int64_t count,
                                         const Rows* k, const Rows* v, const Turn* turn,
                                         const int64_t* slots, const int64_t* offsets,
                                         int64_t threads) {
  Appending work{pool, layer, count, {*k, *v}, turn, slots, offsets};
  kvass::parallel(static_cast<int>(threads), (count + kRowsAShare - 1) / kRowsAShare, append_share,
                  &work);
}
