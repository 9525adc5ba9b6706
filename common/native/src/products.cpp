// Matrix products of bf16 rows with bf16 weights that were packed once.
//
// A weight [outputs, inputs] lies in panels of 32 outputs: for each pair of inputs, the pair's two
// weights of one output after the other. A panel is read from its first byte to its last, and so are
// all panels that one thread computes: with few rows a product takes as long as reading its weights.
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

#include <cstring>

#include "threads.h"

namespace {

constexpr int64_t kPanel = 32;                   // outputs: two vectors of sums a row
constexpr int64_t kPanelPair = 2 * kPanel;       // values of a panel for one pair of inputs
constexpr int kBlock = 12;                       // rows: 24 of 32 registers hold sums
constexpr int64_t kAhead = 4096;                 // bytes; measured: 2 to 8 KiB are alike
constexpr int64_t kChunkBytes = 640 << 10;       // of rows that stay in a second-level cache
constexpr int64_t kPartWork = int64_t{1} << 21;  // pairs of inputs and values: some 50 microseconds

struct Product {
  const uint16_t* rows;
  int64_t count, inputs, outputs;
  const uint16_t* weight;
  const float* bias;  // of whole panels, or null
  void* out;          // bf16, or float32 when not `rounded`
  bool rounded;
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

int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

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

// Computes `rows` rows times one panel.
template <int rows>
void multiply_block(const Product& p, int64_t first, int64_t panel) {
  const int64_t pairs = p.inputs / 2;
  const uint16_t* from = p.rows + first * p.inputs;
  const uint16_t* weight = p.weight + panel * up(p.inputs, 2) * kPanelPair;
  __m512 low[rows], high[rows];
#pragma GCC unroll 12
  for (int row = 0; row < rows; row++) low[row] = high[row] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; pair++, weight += kPanelPair) {
    const __m512bh first_half = (__m512bh)_mm512_loadu_si512(weight);
    const __m512bh second_half = (__m512bh)_mm512_loadu_si512(weight + kPanel);
    const char* ahead = reinterpret_cast<const char*>(weight) + kAhead;
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 64, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
      const int32_t both = load<int32_t>(from + row * p.inputs + 2 * pair);
      const __m512bh values = (__m512bh)_mm512_set1_epi32(both);
      low[row] = _mm512_dpbf16_ps(low[row], first_half, values);
      high[row] = _mm512_dpbf16_ps(high[row], second_half, values);
    }
  }
  if (p.inputs % 2) {  // the last input has no second, and its weights' second halves are zero
    const __m512bh first_half = (__m512bh)_mm512_loadu_si512(weight);
    const __m512bh second_half = (__m512bh)_mm512_loadu_si512(weight + kPanel);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
      const int32_t one = from[row * p.inputs + 2 * pairs];
      const __m512bh values = (__m512bh)_mm512_set1_epi32(one);
      low[row] = _mm512_dpbf16_ps(low[row], first_half, values);
      high[row] = _mm512_dpbf16_ps(high[row], second_half, values);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < rows; row++) store(p, first + row, panel * kPanel, low[row], high[row]);
}

using Multiply = void (*)(const Product&, int64_t, int64_t);
constexpr Multiply kMultiply[kBlock + 1] = {
    nullptr,           multiply_block<1>, multiply_block<2>,  multiply_block<3>,  multiply_block<4>,
    multiply_block<5>, multiply_block<6>, multiply_block<7>,  multiply_block<8>,  multiply_block<9>,
    multiply_block<10>, multiply_block<11>, multiply_block<12>,
};

int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

void multiply_part(void* given, int64_t part) {
  const Product& p = *static_cast<const Product*>(given);
  const int64_t first_row = part / p.ranges * p.chunk;
  const int64_t rows_stop = least(first_row + p.chunk, p.count);
  const int64_t first_panel = part % p.ranges * p.range_panels;
  const int64_t panels_stop = least(first_panel + p.range_panels, up(p.outputs, kPanel));
  const int64_t rows = rows_stop - first_row;
  const int64_t block = up(rows, up(rows, kBlock));  // no block is much smaller than others
  for (int64_t panel = first_panel; panel < panels_stop; panel++)
    for (int64_t row = first_row; row < rows_stop; row += block)
      kMultiply[least(block, rows_stop - row)](p, row, panel);
}

}  // namespace

// Computes bf16 `rows` [count, inputs] times a packed weight, plus `bias` (float32, whole panels; or
// null), into `out` [count, outputs]: bf16 when `rounded`, else float32.
KVASS_PUBLIC void KVASS_AT(kvass_multiply)(int threads, const uint16_t* rows, int64_t count,
                                           int64_t inputs, const uint16_t* weight, int64_t outputs,
                                           const float* bias, void* out, int rounded) {
  if (count <= 0 || outputs <= 0) return;
  Product p{rows, count, inputs, outputs, weight, bias, out, rounded != 0, 0, 0, 0};
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
