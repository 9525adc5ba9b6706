// A paged pool as Python hands it over: common/kernels/native_paged.py holds the same structure.

#pragma once

#include "level.h"

namespace {

enum Format : int64_t { kFp8 = 0, kInt8 = 1, kBf16 = 2, kInt4 = 3 };

// Sizes and distances in bytes, from `BlockLayout`: `row_size` is that of one token's codes of a head,
// which have `scale_parts` numbers in bf16 besides, `block_tokens` apart. `rotation` is the width of a block of the Hadamard
// matrix, `key_rotated` and `value_rotated` say what is stored rotated. `window` is how many positions
// a row attends to, its own the last, and `soft_cap` bounds scores by cap * tanh(score / cap); 0: off.
// `key_offsets` [layer][KV head][number] are taken off K before it is rotated and stored; null: none.
// `key_carry` [layer][KV head][number][number] is what K's numbers are rounded in turn by (carry.h);
// null: each is rounded by itself.
struct Pool {
  unsigned char* memory;
  int64_t block_size, group_size, layer_size, record_size, codes_size, row_size, scale_parts;
  int64_t block_tokens, head_dim, kv_heads, group_heads, query_heads;
  int64_t format, rotation, key_rotated, value_rotated;
  int64_t window;
  double soft_cap;
  const float* key_offsets;
  const float* key_carry;
};

// Where a KV head's numbers are in every slot: offsets from the slot's start.
struct Place {
  int64_t codes[2], scales[2];  // K, V
};

KVASS_INLINE Place place_of(const Pool& pool, int64_t layer, int64_t head) {
  const int64_t inner = head % pool.group_heads;
  Place place;
  for (int value = 0; value < 2; value++) {
    const int64_t record = head / pool.group_heads * pool.group_size + layer * pool.layer_size +
                           value * pool.record_size;
    place.codes[value] = record + inner * pool.block_tokens * pool.row_size;
    place.scales[value] = record + pool.codes_size + inner * pool.scale_parts * pool.block_tokens * 2;
  }
  return place;
}

// How many numbers of an int4 row share a scale and a least number; head_dim is a multiple of 16.
KVASS_INLINE int64_t code_group(int64_t head_dim) { return head_dim % 32 ? 16 : 32; }

}  // namespace
