// How weights lie in memory, and how the products read them (products.cpp).
//
// A weight [outputs, inputs] lies in panels of 32 outputs: for each pair of inputs, the pair's two
// weights of one output after the other. As bf16 that is two vectors a pair. As 8 bits it is one of
// codes, and before every 16 pairs come the group's 32 scales, bf16: a weight is its code times the
// scale of its output, rounded to bf16. That product is exact in float32, so it is rounded once, and
// scales are so large, or zero, that none is denormal (kernels/weight_formats.py). As 4 bits it is half
// a vector of codes: those of the other 16 outputs are the high halves of the first ones' bytes. Before
// every 16 pairs come the group's scales and its least weights, fp16, and a weight is its code times
// the scale, exact, plus the least weight, rounded to float32 and then to bf16. What GGUF files hold
// besides is in block_panels.h.
//
// A panel's reader is opened at each group of pairs (`kGroup`), and then gives them one by one.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "level.h"

namespace {

constexpr int64_t kPanel = 32;                 // outputs: two vectors of sums a row
constexpr int64_t kPanelPair = 2 * kPanel;     // values of a panel for one pair of inputs
constexpr int64_t kGroupPairs = 16;            // that share scales, in most formats
constexpr int64_t kAhead = 4096;               // bytes; measured: 2 to 8 KiB are alike

constexpr int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
constexpr int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

// One pair of inputs: their weights of the panel's first 16 outputs, and of the other 16.
struct Pair {
  __m512bh low, high;
};

KVASS_INLINE void prefetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead, _MM_HINT_T0);
}

// Weights as they are.
struct Bf16Panel {
  static constexpr int64_t kGroup = kGroupPairs;
  const uint8_t* at;

  static int64_t size(int64_t pairs) { return 2 * pairs * kPanelPair; }
  KVASS_INLINE void open_group() {}
  KVASS_INLINE Pair next() {
    const Pair pair{(__m512bh)_mm512_loadu_si512(at), (__m512bh)_mm512_loadu_si512(at + 64)};
    prefetch(at);
    prefetch(at + 64);
    at += 2 * kPanelPair;
    return pair;
  }
};

// Each lane's bf16, as float32, twice: of the eight lanes from `first` on.
KVASS_INLINE __m512 twice(__m512i values, int first) {
  const __m512i lanes = _mm512_set_epi16(7, 0, 7, 0, 6, 0, 6, 0, 5, 0, 5, 0, 4, 0, 4, 0, 3, 0, 3, 0,
                                         2, 0, 2, 0, 1, 0, 1, 0, 0, 0, 0, 0);
  const __m512i from = _mm512_add_epi16(lanes, _mm512_set1_epi16(static_cast<short>(first)));
  return (__m512)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, from, values);
}

KVASS_INLINE __m512 twice(__m256 values) {
  const __m512i lanes = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(values));
}

KVASS_INLINE __m256 halves(const uint8_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Each lane's fp16, as float32, twice: of the eight lanes at `from`.
KVASS_INLINE __m512 twice_half(const uint8_t* from) { return twice(halves(from)); }

// Codes of 8 bits; scales are bf16, or fp16.
template <bool is_half>
struct BytePanel {
  static constexpr int64_t kGroup = kGroupPairs;
  const uint8_t* at;
  __m512 scales[4] = {};

  static int64_t size(int64_t pairs) {
    return pairs * kPanelPair + up(pairs, kGroupPairs) * 2 * kPanel;
  }
  KVASS_INLINE void open_group() {
    prefetch(at);
    for (int part = 0; part < 4; part++)
      scales[part] = is_half ? twice_half(at + 16 * part) : twice(_mm512_loadu_si512(at), 8 * part);
    at += 2 * kPanel;
  }
  KVASS_INLINE __m512 weights(int part) const {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + part);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), scales[part]);
  }
  KVASS_INLINE Pair next() {
    const Pair pair{_mm512_cvtne2ps_pbh(weights(1), weights(0)),
                    _mm512_cvtne2ps_pbh(weights(3), weights(2))};
    prefetch(at);
    at += kPanelPair;
    return pair;
  }
};

// A pair's codes of 4 bits, a vector a part.
struct HalfBytes {
  static constexpr int64_t kSize = kPanelPair / 2;
  __m512i part[4];

  KVASS_INLINE explicit HalfBytes(const uint8_t* at) {
    const __m128i* from = reinterpret_cast<const __m128i*>(at);
    const __m512i one = _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
    const __m512i two = _mm512_cvtepu8_epi32(_mm_loadu_si128(from + 1));
    const __m512i mask = _mm512_set1_epi32(15);
    part[0] = _mm512_and_si512(one, mask);
    part[1] = _mm512_and_si512(two, mask);
    part[2] = _mm512_srli_epi32(one, 4);
    part[3] = _mm512_srli_epi32(two, 4);
  }
};

// Makes a pair of four parts, which `weights` gives.
template <typename Weights>
KVASS_INLINE Pair rounded(Weights weights) {
  return {_mm512_cvtne2ps_pbh(weights(1), weights(0)), _mm512_cvtne2ps_pbh(weights(3), weights(2))};
}

// Codes, scales and least weights.
template <typename Codes>
struct LeastPanel {
  static constexpr int64_t kGroup = kGroupPairs;
  const uint8_t* at;
  __m512 scales[4] = {}, least[4] = {};

  static int64_t size(int64_t pairs) {
    return pairs * Codes::kSize + up(pairs, kGroupPairs) * 4 * kPanel;
  }
  KVASS_INLINE void open_group() {
    prefetch(at);
    prefetch(at + 64);
    for (int part = 0; part < 4; part++) {
      scales[part] = twice_half(at + 16 * part);
      least[part] = twice_half(at + 2 * kPanel + 16 * part);
    }
    at += 4 * kPanel;
  }
  KVASS_INLINE Pair next() {
    const Codes codes(at);
    prefetch(at);
    at += Codes::kSize;
    return rounded([&](int part) __attribute__((always_inline)) {
      return _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes.part[part]), scales[part], least[part]);
    });
  }
};

using Int8Panel = BytePanel<false>;
using Int4Panel = LeastPanel<HalfBytes>;

// Writes a panel's weights as bf16, in the order of a Bf16Panel.
template <typename Panel>
void unpack(const uint8_t* weight, int64_t pairs, uint8_t* out) {
  Panel panel{weight};
  for (int64_t first = 0; first < pairs; first += Panel::kGroup) {
    panel.open_group();
    const int64_t stop = least(first + Panel::kGroup, pairs);
    for (int64_t pair = first; pair < stop; pair++, out += 2 * kPanelPair) {
      const Pair read = panel.next();
      _mm512_store_si512(out, (__m512i)read.low);
      _mm512_store_si512(out + 64, (__m512i)read.high);
    }
  }
}

}  // namespace
