// Stored numbers as float32: rows of codes, and 16 rows turned over into one vector a number.
//
// Decoding is exact. e4m3 codes come out as their value / 256 (a code shifted into a float16's bits
// reads so: common/kernels/formats.py); `kFactor` is put into the scale. A NaN code reads as 480.

#pragma once

#include "lanes.h"
#include "pool.h"

namespace {

typedef unsigned char Bytes16 __attribute__((vector_size(16)));

template <Format format>
struct Codes;

template <>
struct Codes<kFp8> {
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr bool kGrouped = false;
  static constexpr float kFactor = 256.0f;
  // Decodes 16 codes in a row.
  static KVASS_INLINE Floats decode(const unsigned char* at) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xBFFF));
    return {_mm512_cvtph_ps(half)};
#elif defined(__AVX2__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xBFFF));
    return {{_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
             _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))}};
#else
    // As halves become floats: the exponent moves from a bias of 15 to 127, and what was subnormal is
    // made normal by a subtraction, which is exact.
    Floats out;
    float* lane = reinterpret_cast<float*>(&out);
    for (int i = 0; i < kLanes; i++) {
      const uint32_t code = at[i], rest = (code & 0x7f) << 20;
      uint32_t bits = rest + (112u << 23);
      if (rest < (1u << 23)) {
        const uint32_t shifted = rest + (113u << 23);
        float value;
        memcpy(&value, &shifted, 4);
        value -= 0x1p-14f;
        memcpy(&bits, &value, 4);
      }
      bits |= (code & 0x80) << 24;
      memcpy(&lane[i], &bits, 4);
    }
    return out;
#endif
  }
};

template <>
struct Codes<kInt8> {
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr bool kGrouped = false;
  static constexpr float kFactor = 1.0f;
  static KVASS_INLINE Floats decode(const unsigned char* at) {
#if defined(__AVX512F__)
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)))};
#elif defined(__AVX2__)
    return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at))),
             _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8))))}};
#else
    Floats out;
    float* lane = reinterpret_cast<float*>(&out);
    for (int i = 0; i < kLanes; i++) lane[i] = static_cast<signed char>(at[i]);
    return out;
#endif
  }
};

template <>
struct Codes<kBf16> {
  static constexpr int kBytes = 2;
  static constexpr bool kScaled = false;
  static constexpr bool kGrouped = false;
  static constexpr float kFactor = 1.0f;
  static KVASS_INLINE Floats decode(const unsigned char* at) {
#if defined(__AVX512F__)
    const __m256i words = _mm256_loadu_si256((const __m256i*)at);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
#elif defined(__AVX2__)
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(at + 16)));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
             _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))}};
#else
    uint16_t words[kLanes];
    memcpy(words, at, sizeof(words));
    Ints out;
    int32_t* lane = reinterpret_cast<int32_t*>(&out);
    for (int i = 0; i < kLanes; i++) lane[i] = static_cast<int32_t>(words[i]) << 16;
    return from_bits(out);
#endif
  }
  // Eight numbers, and the next eight.
  static KVASS_INLINE Floats decode_halves(const unsigned char* first, const unsigned char* second) {
#if defined(__AVX512F__)
    const __m256i words = _mm256_loadu2_m128i((const __m128i*)second, (const __m128i*)first);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
#else
    unsigned char words[32];
    memcpy(words, first, 16);
    memcpy(words + 16, second, 16);
    return decode(words);
#endif
  }
};

// Two numbers in a byte. A group's scale and least number are put in when a row is decoded, so that
// none is left for a position (groups.h).
template <>
struct Codes<kInt4> {
  static constexpr bool kScaled = false;
  static constexpr bool kGrouped = true;
  // The lower halves of 16 bytes, and the upper ones.
  static KVASS_INLINE Floats low(const unsigned char* at) { return halves<0>(at); }
  static KVASS_INLINE Floats high(const unsigned char* at) { return halves<4>(at); }
  // Decodes 16 codes in a row: eight bytes.
  static KVASS_INLINE Floats decode(const unsigned char* at) {
#if defined(__AVX512F__)
    // A byte in 64 bits; the upper half's lowest bits become its upper half's.
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)at));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)))};
#elif defined(__SSE2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)at), mask = _mm_set1_epi8(15);
    const __m128i upper = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    alignas(16) unsigned char codes[16];
    _mm_store_si128((__m128i*)codes, _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), upper));
    return Codes<kInt8>::decode(codes);
#else
    unsigned char codes[16];
    for (int i = 0; i < 8; i++) {
      codes[2 * i] = at[i] & 15;
      codes[2 * i + 1] = at[i] >> 4;
    }
    return Codes<kInt8>::decode(codes);
#endif
  }

 private:
  template <int shift>
  static KVASS_INLINE Floats halves(const unsigned char* at) {
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
    const __m512i half = _mm512_and_si512(_mm512_srli_epi32(bytes, shift), _mm512_set1_epi32(15));
    return {_mm512_cvtepi32_ps(half)};
#else
    alignas(16) unsigned char codes[16];
    for (int i = 0; i < 16; i++) codes[i] = at[i] >> shift & 15;
    return Codes<kInt8>::decode(codes);
#endif
  }
};

// Bytes of a row.
template <class Code>
constexpr int64_t row_size(int64_t numbers) {
  if constexpr (Code::kGrouped)
    return numbers / 2;
  else
    return numbers * Code::kBytes;
}

// --- turning 16 rows of bytes over ---

typedef uint16_t Words8 __attribute__((vector_size(16)));

// Some columns of 16 bytes, side by side, that are turned over at once. `low` and `high` interleave the
// lower and the upper halves of two columns, by numbers of 1 or 2 bytes.
struct Narrow {
  static constexpr int kColumns = 1;
  using Vector = Bytes16;
  template <int bytes>
  static KVASS_INLINE Vector low(Vector a, Vector b) {
    if constexpr (bytes == 2)
      return (Vector)__builtin_shuffle((Words8)a, (Words8)b, Words8{0, 8, 1, 9, 2, 10, 3, 11});
    else
      return __builtin_shuffle(a, b,
                               Bytes16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  }
  template <int bytes>
  static KVASS_INLINE Vector high(Vector a, Vector b) {
    if constexpr (bytes == 2)
      return (Vector)__builtin_shuffle((Words8)a, (Words8)b, Words8{4, 12, 5, 13, 6, 14, 7, 15});
    else
      return __builtin_shuffle(
          a, b, Bytes16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
  }
};

#if defined(__AVX512BW__)
struct Wide {
  static constexpr int kColumns = 4;
  using Vector = __m512i;
  template <int bytes>
  static KVASS_INLINE Vector low(Vector a, Vector b) {
    return bytes == 2 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpacklo_epi8(a, b);
  }
  template <int bytes>
  static KVASS_INLINE Vector high(Vector a, Vector b) {
    return bytes == 2 ? _mm512_unpackhi_epi16(a, b) : _mm512_unpackhi_epi8(a, b);
  }
};
#else
using Wide = Narrow;
#endif

// Turns 16 rows, `step` bytes apart, over. Number n of a column comes at vector n of `out`, in the
// column's place: all 16 rows' bytes; numbers of 2 bytes take two vectors, eight rows in each. Four
// rounds of a perfect shuffle of the rows.
template <class Columns, int bytes>
KVASS_INLINE void turn_over(const unsigned char* rows, int64_t step, unsigned char* out) {
  using Vector = typename Columns::Vector;
  Vector a[16], b[16];
  KVASS_UNROLL for (int i = 0; i < 16; i++) memcpy(&a[i], rows + i * step, sizeof(Vector));
  KVASS_UNROLL for (int round = 0; round < 2; round++) {
    KVASS_UNROLL for (int i = 0; i < 8; i++) {
      b[2 * i] = Columns::template low<bytes>(a[i], a[i + 8]);
      b[2 * i + 1] = Columns::template high<bytes>(a[i], a[i + 8]);
    }
    KVASS_UNROLL for (int i = 0; i < 8; i++) {
      a[2 * i] = Columns::template low<bytes>(b[i], b[i + 8]);
      a[2 * i + 1] = Columns::template high<bytes>(b[i], b[i + 8]);
    }
  }
  KVASS_UNROLL for (int i = 0; i < 16; i++) memcpy(out + i * sizeof(Vector), &a[i], sizeof(Vector));
}

// Asks for a cache line that is decoded some thousand cycles later. Lines are asked for one by one,
// between decoding others: a core stops when it has asked for some tens at once.
KVASS_INLINE void ask_for(const unsigned char* at) { __builtin_prefetch(at); }

// Decodes some columns of 16 rows to `out`, one vector of `out_step` floats' distance a number; asks
// for as many bytes from `ahead` on.
template <class Code, class Columns>
KVASS_INLINE void decode_columns(const unsigned char* rows, int64_t step, float* out,
                                 int64_t out_step, const unsigned char* ahead) {
  alignas(64) unsigned char turned[16 * sizeof(typename Columns::Vector)];
  turn_over<Columns, Code::kBytes>(rows, step, turned);
  constexpr int kNumbers = 16 / Code::kBytes;
  for (int column = 0; column < Columns::kColumns; column++)
    KVASS_UNROLL for (int i = 0; i < kNumbers; i++) {
      if (i % (kNumbers / 4) == 0) ask_for(ahead + 64 * (4 * column + i / (kNumbers / 4)));
      const unsigned char* at = turned + 16 * (Columns::kColumns * i * Code::kBytes + column);
      float* to = out + (column * kNumbers + i) * out_step;
      if constexpr (Code::kBytes == 1)
        store(to, Code::decode(at));
      else
        store(to, Code::decode_halves(at, at + 16 * Columns::kColumns));
    }
}

// Decodes 16 rows of `numbers` (a multiple of 16) to out[number][row]; `ahead` are 16 other rows.
template <class Code>
KVASS_INLINE void decode_turned_rows(const unsigned char* rows, int64_t numbers, float* out,
                                     int64_t out_step, const unsigned char* ahead) {
  const int64_t step = numbers * Code::kBytes;
  int64_t done = 0;
  for (; done + 16 * Wide::kColumns <= step; done += 16 * Wide::kColumns)
    decode_columns<Code, Wide>(rows + done, step, out + done / Code::kBytes * out_step, out_step,
                               ahead + 16 * done);
  for (; done < step; done += 16)
    decode_columns<Code, Narrow>(rows + done, step, out + done / Code::kBytes * out_step, out_step,
                                 ahead + 16 * done);
}

// Decodes 16 rows of `numbers` to out[row][number]; `ahead` are 16 other rows.
template <class Code>
KVASS_INLINE void decode_rows(const unsigned char* rows, int64_t numbers, float* out,
                              const unsigned char* ahead) {
  constexpr int kStep = 64 / Code::kBytes;  // numbers of a line; as many rows make whole lines of all
  for (int64_t i = 0; i < 16 * numbers; i += kStep) {
    ask_for(ahead + i * Code::kBytes);
    KVASS_UNROLL for (int at = 0; at < kStep; at += kLanes)
      store(out + i + at, Code::decode(rows + (i + at) * Code::kBytes));
  }
}

}  // namespace
