// Matrix products of bf16 rows with bf16 weights that were packed once.
//
// A weight [outputs, inputs] lies in panels of 32 outputs (panels.h), as bf16 or as codes of fewer
// bits, which become bf16 on their way. A panel is read from its first byte to its last, and so are
// all panels that one thread computes: with few rows a product takes as long as reading its weights.
// For more rows than a block has, a panel of codes is made bf16 once, in memory that stays in a cache.
//
// Each value of the result has one float32 sum of its own, which takes the pairs of inputs in
// ascending order, two products at a time (vdpbf16ps). Neither the number of rows, nor which rows and
// outputs are computed together, nor the number of threads changes that: a row has the same bits in
// any company.
//
// It is compiled for one level only: without the instruction it would be slower than torch.

#include "level.h"

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <cstdlib>
#include <cstring>

#include "block_panels.h"
#include "calls.h"
#include "panels.h"
#include "threads.h"

namespace {

constexpr int kBlock = 12;                       // rows: 24 of 32 registers hold sums
constexpr int64_t kChunkBytes = 640 << 10;       // of rows that stay in a second-level cache
constexpr int64_t kPartWork = int64_t{1} << 21;  // pairs of inputs and values: some 50 microseconds

struct Product;
using Multiply = void (*)(const Product&, int64_t, int64_t, const uint8_t*);

// What weights are kept as.
struct Format {
  Multiply multiply[kBlock + 1];  // by the number of rows
  int64_t (*size)(int64_t pairs);  // bytes of a panel
  void (*unpack)(const uint8_t*, int64_t pairs, uint8_t*);
};

struct Product {
  const uint16_t* rows;
  int64_t count, inputs, outputs;
  const uint8_t* weight;
  const float* bias;  // of whole panels, or null
  void* out;          // bf16, or float32 when not `rounded`
  bool rounded;
  const Format* format;
  int64_t panel_size;   // bytes
  int64_t chunk;        // rows of a chunk; parts are chunks of rows times ranges of panels
  int64_t ranges;       // of panels
  int64_t range_panels;  // panels of a range
};

template <typename Value>
Value load(const void* from) {
  Value value;
  memcpy(&value, from, sizeof value);
  return value;
}

// Rounds and stores what a row has of a panel; outputs beyond the last are not written.
void store(const Product& p, int64_t row, int64_t output, __m512 low, __m512 high) {
  const int64_t left = p.outputs - output;
  const uint32_t mask = left >= kPanel ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
  if (p.bias != nullptr) {
    low = _mm512_add_ps(low, _mm512_loadu_ps(p.bias + output));
    high = _mm512_add_ps(high, _mm512_loadu_ps(p.bias + output + 16));
  }
  const int64_t at = row * p.outputs + output;
  if (p.rounded) {
    const __m512i values = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_mask_storeu_epi16(static_cast<uint16_t*>(p.out) + at, mask, values);
    return;
  }
  float* out = static_cast<float*>(p.out) + at;
  _mm512_mask_storeu_ps(out, static_cast<__mmask16>(mask), low);
  _mm512_mask_storeu_ps(out + 16, static_cast<__mmask16>(mask >> 16), high);
}

// Adds one pair of inputs to the sums; `both` gives a row's two values.
template <int rows, typename Both>
KVASS_INLINE void add_pair(__m512* low, __m512* high, const Pair& weights, Both both) {
#pragma GCC unroll 12
  for (int row = 0; row < rows; row++) {
    const __m512bh values = (__m512bh)_mm512_set1_epi32(both(row));
    low[row] = _mm512_dpbf16_ps(low[row], weights.low, values);
    high[row] = _mm512_dpbf16_ps(high[row], weights.high, values);
  }
}

// Computes `rows` rows times one panel, whose weights begin at `weight`.
template <int rows, typename Panel>
void multiply_block(const Product& p, int64_t first, int64_t panel, const uint8_t* weight) {
  const int64_t pairs = p.inputs / 2;
  const uint16_t* from = p.rows + first * p.inputs;
  const int64_t inputs = p.inputs;
  Panel reader{weight};
  __m512 low[rows], high[rows];
#pragma GCC unroll 12
  for (int row = 0; row < rows; row++) low[row] = high[row] = _mm512_setzero_ps();
  for (int64_t group = 0; group < pairs; group += Panel::kGroup) {
    reader.open_group();
    const int64_t stop = least(group + Panel::kGroup, pairs);
    for (int64_t pair = group; pair < stop; pair++)
      add_pair<rows>(low, high, reader.next(), [=](int row) __attribute__((always_inline)) {
        return load<int32_t>(from + row * inputs + 2 * pair);
      });
  }
  if (inputs % 2) {  // the last input has no second: zero times whatever weight
    if (pairs % Panel::kGroup == 0) reader.open_group();
    add_pair<rows>(low, high, reader.next(), [=](int row) __attribute__((always_inline)) {
      return static_cast<int32_t>(from[row * inputs + 2 * pairs]);
    });
  }
#pragma GCC unroll 12
  for (int row = 0; row < rows; row++) store(p, first + row, panel * kPanel, low[row], high[row]);
}

#define KVASS_BLOCKS(Panel)                                                                       \
  {                                                                                               \
    nullptr, multiply_block<1, Panel>, multiply_block<2, Panel>, multiply_block<3, Panel>,        \
        multiply_block<4, Panel>, multiply_block<5, Panel>, multiply_block<6, Panel>,             \
        multiply_block<7, Panel>, multiply_block<8, Panel>, multiply_block<9, Panel>,             \
        multiply_block<10, Panel>, multiply_block<11, Panel>, multiply_block<12, Panel>,          \
  }

// By number; packed.py knows them too. Q4_1 is Int4Panel.
constexpr Format kFormats[] = {
    {KVASS_BLOCKS(Bf16Panel), Bf16Panel::size, nullptr},
    {KVASS_BLOCKS(Int8Panel), Int8Panel::size, unpack<Int8Panel>},
    {KVASS_BLOCKS(Int4Panel), Int4Panel::size, unpack<Int4Panel>},
    {KVASS_BLOCKS(Q8Panel), Q8Panel::size, unpack<Q8Panel>},
    {KVASS_BLOCKS(Q4ZeroPanel), Q4ZeroPanel::size, unpack<Q4ZeroPanel>},
    {KVASS_BLOCKS(Q4KPanel), Q4KPanel::size, unpack<Q4KPanel>},
    {KVASS_BLOCKS(Q6KPanel), Q6KPanel::size, unpack<Q6KPanel>},
    {KVASS_BLOCKS(Q5ZeroPanel), Q5ZeroPanel::size, unpack<Q5ZeroPanel>},
    {KVASS_BLOCKS(Q5LeastPanel), Q5LeastPanel::size, unpack<Q5LeastPanel>},
    {KVASS_BLOCKS(Q5KPanel), Q5KPanel::size, unpack<Q5KPanel>},
};

// Returns room of this thread's, which it keeps: threads are few, and last as long as the process.
uint8_t* room_of(int64_t size) {
  static thread_local uint8_t* room = nullptr;
  static thread_local int64_t has = 0;
  if (size > has) {
    free(room);
    room = static_cast<uint8_t*>(aligned_alloc(64, static_cast<size_t>(size)));
    has = room == nullptr ? 0 : size;
  }
  return room;
}

void multiply_part(void* given, int64_t part) {
  const Product& p = *static_cast<const Product*>(given);
  const int64_t first_row = part / p.ranges * p.chunk;
  const int64_t rows_stop = least(first_row + p.chunk, p.count);
  const int64_t first_panel = part % p.ranges * p.range_panels;
  const int64_t panels_stop = least(first_panel + p.range_panels, up(p.outputs, kPanel));
  const int64_t rows = rows_stop - first_row;
  const int64_t block = up(rows, up(rows, kBlock));  // no block is much smaller than others
  const int64_t pairs = up(p.inputs, 2);
  const Format* format = p.format;
  // Without room, each block makes them bf16 anew: slower, and the same.
  uint8_t* room = format->unpack != nullptr && rows > kBlock ? room_of(kFormats->size(pairs)) : nullptr;
  if (room != nullptr) format = kFormats;
  for (int64_t panel = first_panel; panel < panels_stop; panel++) {
    const uint8_t* weight = p.weight + panel * p.panel_size;
    if (room != nullptr) {
      p.format->unpack(weight, pairs, room);
      weight = room;
    }
    for (int64_t row = first_row; row < rows_stop; row += block)
      format->multiply[least(block, rows_stop - row)](p, row, panel, weight);
  }
}

}  // namespace

// Computes bf16 `rows` [count, inputs] times a weight packed as `format`, plus `bias` (float32, whole
// panels; or null), into `out` [count, outputs]: bf16 when `rounded`, else float32.
KVASS_PUBLIC void KVASS_AT(kvass_multiply)(int threads, const uint16_t* rows, int64_t count,
                                           int64_t inputs, int format, const uint8_t* weight,
                                           int64_t outputs, const float* bias, void* out,
                                           int rounded) {
  if (count <= 0 || outputs <= 0) return;
  const Format* as = kFormats + format;
  const int64_t size = as->size(up(inputs, 2));
  Product p{rows, count, inputs, outputs, weight, bias, out, rounded != 0, as, size, 0, 0, 0};
  const int64_t most = least(count, kChunkBytes / (2 * inputs + 1) / kBlock * kBlock + kBlock);
  const int64_t chunks = up(count, most);
  p.chunk = chunks == 1 ? count : up(up(count, chunks), kBlock) * kBlock;
  const int64_t panels = up(outputs, kPanel);
  const int64_t wanted = up(p.chunk * panels * kPanel * inputs / 2, kPartWork);
  const int64_t ranges = least(panels, up(wanted, threads) * threads);  // each thread as many
  p.range_panels = up(panels, ranges);
  p.ranges = up(panels, p.range_panels);
  kvass::parallel(threads, up(count, p.chunk) * p.ranges, multiply_part, &p);
}

#endif
