// Quantising new K and V and storing them in a paged pool.
//
// The rules are those of common/kernels/formats.py, bit for bit: a row's largest magnitude meets the
// largest code, its scale is bf16, codes are computed with the rounded scale, round to even, saturate.

#include "calls.h"
#include "carry.h"
#include "paged.h"
#include "threads.h"

namespace {

constexpr int64_t kRowsAShare = kLanes;
constexpr int64_t kGroupsMax = kHeadMax / 16;

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

float clamped(float value, float least, float most) {
  value = value > most ? most : value;
  return value < least ? least : value;
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

// The scales of a row: of each group of numbers, what a code is multiplied by, and what is then added.
struct RowScales {
  int64_t groups, size;
  uint16_t scale[kGroupsMax], least[kGroupsMax];
};

// A number's bits as an integer in the order of numbers, and back; NaNs are above or below all.
int32_t in_order(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

float out_of_order(int32_t place) {
  const int32_t bits = in_order(place);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Finds an int4 group's scale and least number.
void find_group(const float* row, int64_t count, uint16_t* scale, uint16_t* least) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t i = 0; i < count; i++) {
    const int32_t place = in_order(bits_of(row[i]));
    low = place < low ? place : low;
    high = place > high ? place : high;
  }
  *least = bf16_bits(out_of_order(low) + 0.0f);  // -0 becomes 0
  *scale = scale_or_one(bf16_bits((out_of_order(high) - bf16_value(*least)) / 15.0f));
}

void find_scales(const Pool& pool, const float* row, RowScales* scales) {
  if (pool.format != kInt4) {
    *scales = {1, pool.head_dim, {}, {}};
    scales->scale[0] = scale_of(row, pool.head_dim, pool.format == kFp8 ? 448.0f : 127.0f);
    return;
  }
  scales->size = code_group(pool.head_dim);
  scales->groups = pool.head_dim / scales->size;
  for (int64_t i = 0; i < scales->groups; i++)
    find_group(row + i * scales->size, scales->size, &scales->scale[i], &scales->least[i]);
}

void store_scales(const Pool& pool, const RowScales& scales, unsigned char* at) {
  const int64_t step = pool.block_tokens * 2;
  for (int64_t i = 0; i < scales.groups; i++) {
    memcpy(at + i * step, &scales.scale[i], 2);
    if (pool.format == kInt4) memcpy(at + (scales.groups + i) * step, &scales.least[i], 2);
  }
}

// Turns numbers into units of their scales.
void divide(const RowScales& scales, float* row) {
  for (int64_t group = 0; group < scales.groups; group++, row += scales.size) {
    const float scale = bf16_value(scales.scale[group]), least = bf16_value(scales.least[group]);
    for (int64_t i = 0; i < scales.size; i++) row[i] = (row[i] - least) / scale;
  }
}

// The nearest integer, ties to even, in the lowest bits: what adding 1.5 * 2**23 rounds to.
unsigned char integer_code(float ratio) {
  return static_cast<unsigned char>(bits_of(ratio + 12582912.0f));
}

// Stores the codes of numbers in units of their scales.
void store_codes(const Pool& pool, const float* ratios, unsigned char* codes) {
  const int64_t count = pool.head_dim;
  if (pool.format == kFp8)
    for (int64_t i = 0; i < count; i++) codes[i] = e4m3_code(clamped(ratios[i], -448.0f, 448.0f));
  if (pool.format == kInt8)
    for (int64_t i = 0; i < count; i++) codes[i] = integer_code(clamped(ratios[i], -127.0f, 127.0f));
  if (pool.format == kInt4)
    for (int64_t i = 0; i < count / 2; i++) {
      const unsigned char low = integer_code(clamped(ratios[2 * i], 0.0f, 15.0f)) & 15;
      const unsigned char high = integer_code(clamped(ratios[2 * i + 1], 0.0f, 15.0f)) & 15;
      codes[i] = static_cast<unsigned char>(low | high << 4);
    }
}

void store_bf16(const float* row, int64_t count, unsigned char* codes) {
  for (int64_t i = 0; i < count; i++) {
    const uint16_t bits = bf16_bits(row[i]);
    memcpy(codes + 2 * i, &bits, 2);
  }
}

// Reads a head as it is to be stored, but for its format.
void read_row(const Appending& work, int64_t row, int64_t head, int value, float* numbers) {
  const Pool& pool = *work.pool;
  read_head(work.rows[value], row, head, pool.head_dim, value ? nullptr : work.turn, numbers);
  if (!value && pool.key_offsets != nullptr) {
    const float* offsets = pool.key_offsets + (work.layer * pool.kv_heads + head) * pool.head_dim;
    for (int64_t i = 0; i < pool.head_dim; i++) numbers[i] -= offsets[i];
  }
  if (value ? pool.value_rotated : pool.key_rotated) rotate(numbers, pool.head_dim, pool.rotation);
}

// Puts a row into a lane, and gets it back.
void put_lane(const RowScales& scales, const float* row, int64_t lane, Sixteen* rows) {
  for (int64_t i = 0; i < scales.groups * scales.size; i++) rows->numbers[i * kLanes + lane] = row[i];
  for (int64_t i = 0; i < scales.groups; i++) {
    rows->scale[i * kLanes + lane] = bf16_value(scales.scale[i]);
    rows->least[i * kLanes + lane] = bf16_value(scales.least[i]);
  }
}

void get_lane(const Sixteen& rows, int64_t count, int64_t lane, float* row) {
  for (int64_t i = 0; i < count; i++) row[i] = rows.numbers[i * kLanes + lane];
}

// Stores K or V of one head of rows [first, stop), at most 16.
void append_head(const Appending& work, int64_t first, int64_t stop, int64_t head, int value) {
  const Pool& pool = *work.pool;
  const Place place = place_of(pool, work.layer, head);
  const bool in_turn = !value && pool.key_carry != nullptr && pool.format != kBf16;
  alignas(64) float numbers[kHeadMax];
  Sixteen rows;
  if (in_turn) memset(&rows, 0, sizeof(rows));
  for (int64_t row = first; row < stop; row++) {
    const int64_t offset = work.offsets[row];
    unsigned char* slot = pool.memory + work.slots[row] * pool.block_size;
    unsigned char* codes = slot + place.codes[value] + offset * pool.row_size;
    read_row(work, row, head, value, numbers);
    if (pool.format == kBf16) {
      store_bf16(numbers, pool.head_dim, codes);
      continue;
    }
    RowScales scales;
    find_scales(pool, numbers, &scales);
    store_scales(pool, scales, slot + place.scales[value] + 2 * offset);
    if (in_turn) {
      put_lane(scales, numbers, row - first, &rows);
      continue;
    }
    divide(scales, numbers);
    store_codes(pool, numbers, codes);
  }
  if (!in_turn) return;
  const int64_t matrix = work.layer * pool.kv_heads + head;
  round_in_turn(pool, &rows, pool.key_carry + matrix * pool.head_dim * pool.head_dim);
  for (int64_t row = first; row < stop; row++) {
    unsigned char* slot = pool.memory + work.slots[row] * pool.block_size;
    get_lane(rows, pool.head_dim, row - first, numbers);
    store_codes(pool, numbers, slot + place.codes[value] + work.offsets[row] * pool.row_size);
  }
}

void append_share(void* context, int64_t part) {
  const Appending& work = *static_cast<const Appending*>(context);
  const int64_t first = part * kRowsAShare, rest = work.count - first;
  const int64_t stop = first + (rest < kRowsAShare ? rest : kRowsAShare);
  for (int64_t head = 0; head < work.pool->kv_heads; head++)
    for (int value = 0; value < 2; value++) append_head(work, first, stop, head, value);
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
