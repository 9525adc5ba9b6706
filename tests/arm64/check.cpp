// What append, attention and copies make of numbers that are the same everywhere: one line a case, for
// tests/test_arm64.py to compare with another machine's.

#include "attention.cpp"

#include <cstdio>
#include <cstdlib>

KVASS_PUBLIC void KVASS_AT(kvass_copy_sum)(uint64_t count, const uint64_t* targets,
                                           const uint64_t* sources, uint64_t group_size,
                                           uint64_t groups, uint64_t* sums);

namespace {

constexpr int64_t kTokens = 1300, kHeads = 2, kShare = 3;

uint64_t hash(const void* data, size_t size) {  // FNV-1a
  uint64_t found = 14695981039346656037u;
  for (size_t i = 0; i < size; i++)
    found = (found ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  return found;
}

// Numbers from -4 to 4, each some 16 bits.
float* numbers(int64_t count) {
  static uint64_t state = 1;
  float* made = static_cast<float*>(malloc(4 * count));
  for (int64_t i = 0; i < count; i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    made[i] = static_cast<float>(static_cast<int64_t>(state >> 48) - 32768) / 8192;
  }
  return made;
}

Pool pool_of(Format format, int64_t depth, int64_t tokens) {
  const int64_t parts = format == kInt4 ? 2 * depth / code_group(depth) : format == kBf16 ? 0 : 1;
  const int64_t row = format == kInt4 ? depth / 2 : format == kBf16 ? 2 * depth : depth;
  const int64_t codes = kHeads * tokens * row;
  const int64_t record = (codes + kHeads * tokens * parts * 2 + 63) / 64 * 64;
  const int64_t blocks = (kTokens + tokens - 1) / tokens, size = 2 * record;
  auto* memory = static_cast<unsigned char*>(calloc(blocks, size));
  return {memory, size, size, size, record, codes, row, parts, tokens, depth, kHeads, kHeads,
          kHeads * kShare, format, depth & -depth, format != kBf16, format == kInt8 || format == kInt4,
          0, 0, nullptr, nullptr};
}

void check(Format format, int64_t depth, int64_t tokens, int64_t window, double soft_cap) {
  Pool pool = pool_of(format, depth, tokens);
  pool.window = window;
  pool.soft_cap = soft_cap;
  const int64_t blocks = (kTokens + tokens - 1) / tokens, width = kHeads * depth;
  int64_t table[kTokens], slots[kTokens], offsets[kTokens], zeros[kTokens] = {}, positions[kTokens];
  for (int64_t i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
  for (int64_t i = 0; i < kTokens; i++) {
    slots[i] = table[i / tokens];
    offsets[i] = i % tokens;
    positions[i] = kTokens - 60 + i;
  }
  if (format != kBf16 && soft_cap == 0) {
    pool.key_offsets = numbers(width);
    float* carry = numbers(width * depth);
    for (int64_t i = 0; i < width * depth; i++) carry[i] /= 64;
    pool.key_carry = carry;
  }
  const Turn turn{numbers(kTokens * depth / 2), numbers(kTokens * depth / 2)};
  const Rows k{numbers(kTokens * width), width, 0}, v{numbers(kTokens * width), width, 0};
  KVASS_AT(kvass_append)(&pool, 0, kTokens, &k, &v, &turn, slots, offsets, 1);
  const int64_t rows = 60, numbers_out = rows * width * kShare;
  const Rows q{numbers(numbers_out), width * kShare, 0};
  Step step{};
  step.tables = table;
  step.table_width = blocks;
  step.row_table = zeros;
  step.row_position = positions;
  step.rows = rows;
  step.threads = 2;
  step.groups = static_cast<Group*>(malloc(rows * sizeof(Group)));
  step.shares = static_cast<Share*>(malloc(rows * 8 * sizeof(Share)));
  step.left = static_cast<int32_t*>(malloc(rows * kHeads * 4));
  KVASS_AT(kvass_plan_attention)(&pool, &step);
  step.partials = static_cast<float*>(malloc(4 * step.partial_count + 4));
  float* out = static_cast<float*>(malloc(4 * numbers_out));
  KVASS_AT(kvass_attend)(&pool, &step, 0, &q, &turn, out);
  printf("%ld %ld %ld %ld %.0f: stored %016lx, attended %016lx, first %g\n", (long)format, (long)depth,
         (long)tokens, (long)window, soft_cap, (long)hash(pool.memory, blocks * pool.block_size),
         (long)hash(out, 4 * numbers_out), out[0]);
}

}  // namespace

int main() {
  constexpr Format formats[] = {kFp8, kInt8, kBf16, kInt4};
  constexpr int64_t depths[] = {64, 80};
  for (const Format format : formats)
    for (const int64_t depth : depths) {
      check(format, depth, 16, 0, 0);
      check(format, depth, 7, 100, 5);
    }
  const uint64_t size = 200001;
  float* data = numbers(size);
  uint64_t sums[4], source = (uint64_t)data, target = (uint64_t)malloc(4 * size);
  KVASS_AT(kvass_copy_sum)(1, &target, &source, size, 4, sums);
  const bool same = memcmp((void*)target, data, 4 * size) == 0;
  printf("copies %d, sums %016lx\n", same, (long)hash(sums, sizeof sums));
}
