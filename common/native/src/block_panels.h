// How matrices of GGUF files lie in panels (panels.h): as there, with the file's own codes, scales and
// least weights, none of them rounded. Inputs fill whole groups, as in the file.
//
//   Q8_0   8 bits as in panels.h, with scales in fp16
//   Q4_1   4 bits as in panels.h
//   Q4_0   the same without least weights: a code less 8, times the scale
//   Q5_1   as Q4_1; after each pair's half bytes come 8 bytes with the codes' fifth bits, in order
//   Q5_0   as Q4_0 with Q5_1's codes: a code less 16
//   Q4_K   before every 8 groups 32 scales and 32 least ones, fp16; before each group of 16 pairs a
//          byte each a scale and a least weight is multiplied by. Those products are exact
//   Q5_K   as Q4_K with Q5_1's codes
//   Q6_K   before every 16 groups 32 scales, fp16; before each group of 8 pairs a byte each a scale is
//          multiplied by. A pair has half bytes as above, then 16 bytes with two bits for each of four
//          parts; a code is less 32. All products are exact
//
// common/kernels/gguf_blocks.py defines the values, and block_panels.py makes the panels.

#pragma once

#include "panels.h"

namespace {

constexpr int64_t kSuperPairs = 128;  // of a K format's block

// A pair's codes of 5 bits.
struct FiveBits {
  static constexpr int64_t kSize = kPanelPair / 8 * 5;
  __m512i part[4];

  KVASS_INLINE explicit FiveBits(const uint8_t* at) {
    const HalfBytes low(at);
    uint64_t bits;
    memcpy(&bits, at + HalfBytes::kSize, sizeof bits);
    const __m512i fifth = _mm512_set1_epi32(16);
    for (int i = 0; i < 4; i++) {
      const __mmask16 has = static_cast<__mmask16>(bits >> 16 * i);
      part[i] = _mm512_mask_or_epi32(low.part[i], has, low.part[i], fifth);
    }
  }
};

// Codes and scales: `zero` is taken off a code.
template <typename Codes, int zero>
struct ScaledPanel {
  static constexpr int64_t kGroup = kGroupPairs;
  const uint8_t* at;
  __m512 scales[4] = {};

  static int64_t size(int64_t pairs) { return pairs * Codes::kSize + pairs / kGroup * 2 * kPanel; }
  KVASS_INLINE void open_group() {
    prefetch(at);
    for (int part = 0; part < 4; part++) scales[part] = twice_half(at + 16 * part);
    at += 2 * kPanel;
  }
  KVASS_INLINE Pair next() {
    const Codes codes(at);
    prefetch(at);
    at += Codes::kSize;
    return rounded([&](int part) __attribute__((always_inline)) {
      const __m512i code = _mm512_sub_epi32(codes.part[part], _mm512_set1_epi32(zero));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(code), scales[part]);
    });
  }
};

KVASS_INLINE __m128i eight_bytes(const uint8_t* at) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
}

// Codes; scales and least weights are products.
template <typename Codes>
struct SuperPanel {
  static constexpr int64_t kGroup = kGroupPairs;
  const uint8_t* at;
  const uint8_t* super = nullptr;
  int64_t groups = 0;
  __m512 scales[4] = {}, least[4] = {};

  static int64_t size(int64_t pairs) {
    return pairs * Codes::kSize + pairs / kGroup * 2 * kPanel + pairs / kSuperPairs * 4 * kPanel;
  }
  KVASS_INLINE void open_group() {
    if (groups++ % (kSuperPairs / kGroup) == 0) {
      super = at;
      prefetch(at);
      prefetch(at + 64);
      at += 4 * kPanel;
    }
    prefetch(at);
    for (int part = 0; part < 4; part++) {
      scales[part] = shared(super + 16 * part, at + 8 * part);
      least[part] = shared(super + 2 * kPanel + 16 * part, at + kPanel + 8 * part);
    }
    at += 2 * kPanel;
  }
  KVASS_INLINE static __m512 shared(const uint8_t* half, const uint8_t* bytes) {
    const __m256i factors = _mm256_cvtepu8_epi32(eight_bytes(bytes));
    return twice(_mm256_mul_ps(_mm256_cvtepi32_ps(factors), halves(half)));
  }
  KVASS_INLINE Pair next() {
    const Codes codes(at);
    prefetch(at);
    at += Codes::kSize;
    return rounded([&](int part) __attribute__((always_inline)) {
      return _mm512_fmsub_ps(_mm512_cvtepi32_ps(codes.part[part]), scales[part], least[part]);
    });
  }
};

// Q6_K.
struct Q6KPanel {
  static constexpr int64_t kGroup = 8;
  const uint8_t* at;
  const uint8_t* super = nullptr;
  int64_t groups = 0;
  __m512 scales[4] = {};

  static int64_t size(int64_t pairs) {
    return pairs * kPanelPair / 4 * 3 + pairs / kGroup * kPanel + pairs / kSuperPairs * 2 * kPanel;
  }
  KVASS_INLINE void open_group() {
    if (groups++ % (kSuperPairs / kGroup) == 0) {
      super = at;
      prefetch(at);
      at += 2 * kPanel;
    }
    prefetch(at);
    for (int part = 0; part < 4; part++) {
      const __m256i factors = _mm256_cvtepi8_epi32(eight_bytes(at + 8 * part));
      scales[part] = twice(_mm256_mul_ps(_mm256_cvtepi32_ps(factors), halves(super + 16 * part)));
    }
    at += kPanel;
  }
  KVASS_INLINE Pair next() {
    const HalfBytes codes(at);
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + kPanelPair / 2));
    const __m512i more = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bits), 4);
    const __m512i mask = _mm512_set1_epi32(3 << 4), zero = _mm512_set1_epi32(32);
    prefetch(at);
    at += kPanelPair / 4 * 3;
    return rounded([&](int part) __attribute__((always_inline)) {
      const __m512i high = _mm512_and_si512(_mm512_srli_epi32(more, 2 * part), mask);
      const __m512i code = _mm512_sub_epi32(_mm512_or_si512(codes.part[part], high), zero);
      return _mm512_mul_ps(_mm512_cvtepi32_ps(code), scales[part]);
    });
  }
};

using Q8Panel = BytePanel<true>;
using Q4ZeroPanel = ScaledPanel<HalfBytes, 8>;
using Q5ZeroPanel = ScaledPanel<FiveBits, 16>;
using Q5LeastPanel = LeastPanel<FiveBits>;
using Q4KPanel = SuperPanel<HalfBytes>;
using Q5KPanel = SuperPanel<FiveBits>;

}  // namespace
