// Plain reads: what memory gives to whoever only adds the words up, of a pool's records in the order
// and on the threads of attention, and of one range. For benchmarks/kernels.py.

#include <cstring>

#include "pool.h"
#include "threads.h"

namespace {

constexpr int64_t kSplit = 1024;  // positions, as attention.cpp has them
constexpr int64_t kPiece = 1 << 20;

struct Reading {
  const Pool* pool;
  const int64_t* table;
  int64_t layer, blocks;  // of a row
  uint64_t* sums;         // one a part
};

uint64_t sum_words(const unsigned char* at, int64_t size) {
  uint64_t sum[8] = {};
  for (int64_t i = 0; i + 64 <= size; i += 64)
    for (int lane = 0; lane < 8; lane++) {
      uint64_t word;
      memcpy(&word, at + i + 8 * lane, 8);
      sum[lane] += word;
    }
  uint64_t total = 0;
  for (int lane = 0; lane < 8; lane++) total += sum[lane];
  return total;
}

// Reads a split's records of one row and KV head, K and V block by block.
void read_split(void* context, int64_t part) {
  const Reading& work = *static_cast<const Reading*>(context);
  const Pool& pool = *work.pool;
  const int64_t splits = (work.blocks * pool.block_tokens + kSplit - 1) / kSplit;
  const int64_t head = part % pool.kv_heads, split = part / pool.kv_heads % splits;
  const int64_t row = part / pool.kv_heads / splits;
  const Place place = place_of(pool, work.layer, head);
  const int64_t size = pool.block_tokens * pool.row_size;
  const int64_t first = split * kSplit / pool.block_tokens, stop = first + kSplit / pool.block_tokens;
  uint64_t sum = 0;
  for (int64_t block = first; block < stop && block < work.blocks; block++) {
    const unsigned char* slot =
        pool.memory + work.table[row * work.blocks + block] * pool.block_size;
    for (int value = 0; value < 2; value++) {
      // The next block's, as attention asks for it.
      if (block + 1 < work.blocks) {
        const unsigned char* next =
            pool.memory + work.table[row * work.blocks + block + 1] * pool.block_size;
        for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(next + place.codes[value] + i);
      }
      sum += sum_words(slot + place.codes[value], size);
      sum += slot[place.scales[value]];
    }
  }
  work.sums[part] = sum;
}

struct Range {
  const unsigned char* from;
  int64_t size;
  uint64_t* sums;
};

void read_piece(void* context, int64_t part) {
  const Range& range = *static_cast<const Range*>(context);
  const int64_t rest = range.size - part * kPiece;
  range.sums[part] = sum_words(range.from + part * kPiece, rest < kPiece ? rest : kPiece);
}

}  // namespace

// Reads `size` bytes in pieces of 1 MiB; `sums` has one value a piece.
KVASS_PUBLIC void KVASS_AT(kvass_read_range)(const unsigned char* from, int64_t size, int64_t threads,
                                             uint64_t* sums) {
  Range range{from, size, sums};
  kvass::parallel(static_cast<int>(threads), (size + kPiece - 1) / kPiece, read_piece, &range);
}

// Reads one layer's records of `rows` tables of `blocks` slots; `sums` has one value a row, split and
// head.
KVASS_PUBLIC void KVASS_AT(kvass_read_layer)(const Pool* pool, int64_t layer, int64_t rows,
                                             int64_t blocks, const int64_t* table, int64_t threads,
                                             uint64_t* sums) {
  Reading work{pool, table, layer, blocks, sums};
  const int64_t splits = (blocks * pool->block_tokens + kSplit - 1) / kSplit;
  kvass::parallel(static_cast<int>(threads), rows * splits * pool->kv_heads, read_split, &work);
}
