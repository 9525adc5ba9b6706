// Units of two bf16 numbers, which vdpbf16ps multiplies and adds to a float32 sum.
//
// Stored numbers become bf16 exactly (codes of one byte by look-ups in tables of bytes), and scales
// are applied in float32 as elsewhere. What is rounded to bf16 are queries, and weights times V's
// scales. The sum of weights is that of the rounded ones, so that rounding moves an output towards
// other values, never away from all of them.

#pragma once

#include "codes.h"

namespace {

typedef uint32_t Unit;    // the first number in the lower half
constexpr int kUnit = 2;  // numbers
struct Units {
  __m512i both;
};

KVASS_INLINE Units load(const Unit* at) { return {_mm512_loadu_si512(at)}; }
KVASS_INLINE void store(Unit* at, const Units& x) { _mm512_storeu_si512(at, x.both); }
KVASS_INLINE Units splat(Unit x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
// c + a's second number * b's, + a's first number * b's.
KVASS_INLINE Floats fused(const Units& a, const Units& b, const Floats& c) {
  return {_mm512_dpbf16_ps(c.part[0], (__m512bh)a.both, (__m512bh)b.both)};
}
// Two vectors of numbers, one after the other, rounded.
KVASS_INLINE Units rounded(const Floats& first, const Floats& second) {
  return {(__m512i)_mm512_cvtne2ps_pbh(second.part[0], first.part[0])};
}
// Each lane's first number and second number.
KVASS_INLINE Floats firsts(const Units& x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x.both, 16))};
}
KVASS_INLINE Floats seconds(const Units& x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(x.both, _mm512_set1_epi32(-65536)))};
}

// How numbers are kept as units; `count` is a multiple of 16.
KVASS_INLINE void keep(const float* numbers, int64_t count, Unit* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Units units = rounded(load(numbers + i), Floats{});
    _mm256_storeu_si256((__m256i*)(out + i / kUnit), _mm512_castsi512_si256(units.both));
  }
}

// --- codes of one byte ---

constexpr uint16_t bf16_of(uint32_t integer, int exponent) {  // integer * 2**exponent, below 256
  if (integer == 0) return 0;
  int top = 7;
  while (!(integer >> top)) top--;
  return static_cast<uint16_t>((127 + top + exponent) << 7 | (integer << (7 - top) & 0x7f));
}

// What a code of one byte means; its sign is its top bit.
template <class Code>
struct Byte;

template <>
struct Byte<Codes<kFp8>> {
  static constexpr uint16_t number(uint32_t code) {  // / 256, as Codes has it
    const uint32_t exponent = code >> 3, rest = code & 7;
    return exponent ? bf16_of(8 + rest, static_cast<int>(exponent) - 18) : bf16_of(rest, -17);
  }
  // Of codes, their magnitudes' codes, but for the top bit.
  static KVASS_INLINE __m512i sizes(__m512i codes) { return codes; }
};

template <>
struct Byte<Codes<kInt8>> {
  static constexpr uint16_t number(uint32_t code) { return bf16_of(code, 0); }
  static KVASS_INLINE __m512i sizes(__m512i codes) {
    // Nobody stores -128: it has no magnitude of 7 bits, and reads as -127.
    return _mm512_abs_epi8(_mm512_max_epi8(codes, _mm512_set1_epi8(-127)));
  }
};

// The lower and the upper bytes of bf16 numbers of codes 0 to 127.
struct Table {
  alignas(64) uint8_t low[128], high[128];
};

template <class Code>
constexpr Table table_of() {
  Table table{};
  for (uint32_t code = 0; code < 128; code++) {
    const uint16_t number = Byte<Code>::number(code);
    table.low[code] = static_cast<uint8_t>(number);
    table.high[code] = static_cast<uint8_t>(number >> 8);
  }
  return table;
}
template <class Code>
constexpr Table kTable = table_of<Code>();

KVASS_INLINE __m512i look_up(const uint8_t* table, __m512i codes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}

// Of each 16 codes the first eight as bf16, and the others.
struct Halves {
  Units first, second;
};

template <class Code>
KVASS_INLINE Halves decode_bytes(__m512i codes) {
  const __m512i sizes = Byte<Code>::sizes(codes);
  const __m512i low = look_up(kTable<Code>.low, sizes);
  // a | (b & c)
  const __m512i high = _mm512_ternarylogic_epi32(look_up(kTable<Code>.high, sizes), codes,
                                                 _mm512_set1_epi8(-128), 0xF8);
  return {{_mm512_unpacklo_epi8(low, high)}, {_mm512_unpackhi_epi8(low, high)}};
}

// Indices: of each 16 bytes the first two of each four, then the others.
struct Order {
  alignas(64) uint8_t at[64];
};
constexpr Order pairs_first() {
  Order order{};
  for (int i = 0; i < 64; i++)
    order.at[i] = static_cast<uint8_t>(i % 16 % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2);
  return order;
}
// Of two vectors of bytes, from number `first` on, the numbers of both side by side, such that
// decode_bytes gives 16 of them and the next 16.
constexpr Order side_by_side(int first) {
  Order order{};
  for (int i = 0; i < 64; i++)
    order.at[i] = static_cast<uint8_t>(first + i / 16 * 4 + i % 16 / 8 * 16 + i % 8 / 2 + i % 2 * 64);
  return order;
}
// The same of 16-bit numbers, from `first` on.
struct WordOrder {
  alignas(64) uint16_t at[32];
};
constexpr WordOrder words_side_by_side(int first) {
  WordOrder order{};
  for (int i = 0; i < 32; i++) order.at[i] = static_cast<uint16_t>(first + i / 2 + i % 2 * 32);
  return order;
}
constexpr Order kPairsFirst = pairs_first(), kSides[2] = {side_by_side(0), side_by_side(32)};
constexpr WordOrder kWordSides[2] = {words_side_by_side(0), words_side_by_side(16)};

// Turns 16 rows of 16 words of 32 bits over.
KVASS_INLINE void turn_over(__m512i* rows) {
  __m512i half[16];
  KVASS_UNROLL for (int i = 0; i < 16; i += 2) {
    half[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    half[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  KVASS_UNROLL for (int i = 0; i < 16; i += 4) {
    KVASS_UNROLL for (int k = 0; k < 2; k++) {
      rows[i + 2 * k] = _mm512_unpacklo_epi64(half[i + k], half[i + k + 2]);
      rows[i + 2 * k + 1] = _mm512_unpackhi_epi64(half[i + k], half[i + k + 2]);
    }
  }
  // rows[4 * a + b] holds words b, 4 + b, … of rows 4 * a to 4 * a + 3.
  KVASS_UNROLL for (int b = 0; b < 4; b++) {
    half[b] = _mm512_shuffle_i32x4(rows[b], rows[4 + b], 0x88);
    half[4 + b] = _mm512_shuffle_i32x4(rows[b], rows[4 + b], 0xDD);
    half[8 + b] = _mm512_shuffle_i32x4(rows[8 + b], rows[12 + b], 0x88);
    half[12 + b] = _mm512_shuffle_i32x4(rows[8 + b], rows[12 + b], 0xDD);
  }
  KVASS_UNROLL for (int b = 0; b < 4; b++) {
    rows[b] = _mm512_shuffle_i32x4(half[b], half[8 + b], 0x88);
    rows[8 + b] = _mm512_shuffle_i32x4(half[b], half[8 + b], 0xDD);
    rows[4 + b] = _mm512_shuffle_i32x4(half[4 + b], half[12 + b], 0x88);
    rows[12 + b] = _mm512_shuffle_i32x4(half[4 + b], half[12 + b], 0xDD);
  }
}

// --- rows ---

// Lines of the next tile that a product asks for a step. While 16 rows are decoded the first half of
// 16 others is asked for; the rest is left to products, since a core stops when it has asked for some
// tens of lines at once, and stands idle when it has asked for none.
template <class Code>
constexpr int kAsks = Code::kBytes;

// Rounds turned[number][16 positions] to units.
KVASS_INLINE void pack_turned(const float* turned, int64_t numbers, Unit* out, int64_t out_step) {
  const __m512i order = _mm512_load_si512(kWordSides[0].at);
  for (int64_t i = 0; i < numbers; i += kUnit, out += out_step) {
    const Units low = rounded(load(turned + i * kLanes), Floats{});
    const Units high = rounded(load(turned + (i + 1) * kLanes), Floats{});
    store(out, Units{_mm512_permutex2var_epi16(low.both, order, high.both)});
  }
}

// Rounds rows[16 positions][number] to units.
KVASS_INLINE void pack_rows(const float* rows, int64_t numbers, Unit* out) {
  const __m512i order = _mm512_load_si512(kWordSides[0].at);
  for (int64_t row = 0; row < kLanes; row += kUnit)
    for (int64_t i = 0; i < numbers; i += kLanes, out += kLanes) {
      const Units low = rounded(load(rows + row * numbers + i), Floats{});
      const Units high = rounded(load(rows + (row + 1) * numbers + i), Floats{});
      store(out, Units{_mm512_permutex2var_epi16(low.both, order, high.both)});
    }
}

// Decodes 16 rows of `numbers` to out[number / 2][row]; `ahead` are 16 other rows.
template <class Code>
KVASS_INLINE void decode_turned_rows(const unsigned char* rows, int64_t numbers, Unit* out,
                                     int64_t out_step, const unsigned char* ahead) {
  const int64_t step = numbers * Code::kBytes;
  if (step % 64) {
    alignas(64) float turned[kHeadMax * kLanes];
    decode_turned_rows<Code>(rows, numbers, turned, kLanes, ahead);
    pack_turned(turned, numbers, out, out_step);
    return;
  }
  for (int64_t done = 0; done < step; done += 64) {
    __m512i words[16];
    KVASS_UNROLL for (int i = 0; i < 16; i++) {
      if (i < 8) ask_for(ahead + i * step + done);
      words[i] = _mm512_loadu_si512(rows + i * step + done);
    }
    turn_over(words);
    if constexpr (Code::kBytes == 2) {
      KVASS_UNROLL for (int i = 0; i < 16; i++, out += out_step) store(out, Units{words[i]});
    } else {
      const __m512i order = _mm512_load_si512(kPairsFirst.at);
      KVASS_UNROLL for (int i = 0; i < 16; i++, out += 2 * out_step) {
        const Halves halves = decode_bytes<Code>(_mm512_shuffle_epi8(words[i], order));
        store(out, halves.first);
        store(out + out_step, halves.second);
      }
    }
  }
}

// Decodes 16 rows of `numbers` to out[row / 2][number]; `ahead` are 16 other rows.
template <class Code>
KVASS_INLINE void decode_rows(const unsigned char* rows, int64_t numbers, Unit* out,
                              const unsigned char* ahead) {
  const int64_t step = numbers * Code::kBytes;
  if (step % 64) {
    alignas(64) float decoded[kLanes * kHeadMax];
    decode_rows<Code>(rows, numbers, decoded, ahead);
    pack_rows(decoded, numbers, out);
    return;
  }
  for (int64_t row = 0; row < kLanes; row += kUnit) {
    const unsigned char* at = rows + row * step;
    for (int64_t done = 0; done < step; done += 64) {
      ask_for(ahead + row / 2 * step + done);
      const __m512i one = _mm512_loadu_si512(at + done), two = _mm512_loadu_si512(at + step + done);
      KVASS_UNROLL for (int half = 0; half < 2; half++) {
        if constexpr (Code::kBytes == 2) {
          const __m512i order = _mm512_load_si512(kWordSides[half].at);
          store(out, Units{_mm512_permutex2var_epi16(one, order, two)});
          out += kLanes;
        } else {
          const __m512i order = _mm512_load_si512(kSides[half].at);
          const Halves halves = decode_bytes<Code>(_mm512_permutex2var_epi8(one, order, two));
          store(out, halves.first);
          store(out + kLanes, halves.second);
          out += 2 * kLanes;
        }
      }
    }
  }
}

// --- weights ---

// What a tile's values are multiplied by, and what a product of that and a weight is multiplied by to
// be a weight again: of the first positions of 16 pairs, then of the second ones.
struct ValueScales {
  alignas(64) float scale[kTile], inverse[kTile];
  // To be called when `count` scales are there. One that is next to nothing counts as little.
  void finish(int64_t count) {
    for (int64_t i = (count + kLanes - 1) / kLanes * kLanes; i < kTile; i += kLanes)
      store(scale + i, splat(1.0f));
    const Floats least = splat(0x1p-100f);
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    for (int i = 0; i < kTile; i += 2 * kLanes) {
      Floats part[2];
      for (int k = 0; k < 2; k++) {
        const Floats found = load(scale + i + k * kLanes);
        const Floats size = from_bits(bits_of(found) & splat_int(0x7fffffff));
        const Floats used = select(less(size, least), least, found);
        store(scale + i + k * kLanes, used);
        part[k] = splat(1.0f) / used;
      }
      store(inverse + i, {_mm512_permutex2var_ps(part[0].part[0], evens, part[1].part[0])});
      store(inverse + i + kLanes, {_mm512_permutex2var_ps(part[0].part[0], odds, part[1].part[0])});
    }
  }
};

// 2**x for x <= 0, exactly 1 for 0, within 3e-6 of it: what is rounded to bf16 need not be nearer.
KVASS_INLINE Floats weight_of(const Floats& x) {
  const Floats rest = {_mm512_reduce_ps(x.part[0], _MM_FROUND_TO_NEG_INF)};
  Floats value = splat(0x1.b7f732p-7f);
  value = fused(value, rest, splat(0x1.abf868p-5f));
  value = fused(value, rest, splat(0x1.ee2450p-3f));
  value = fused(value, rest, splat(0x1.62d6c6p-1f));
  value = fused(value, rest, splat(1.0f));
  return {_mm512_scalef_ps(value.part[0], x.part[0])};
}

constexpr int kRoundRows = 24;  // query heads whose weights are computed together, at most

// The greatest lanes of eight vectors, twice.
KVASS_INLINE Floats greatest_lanes(const Floats* of) {
  __m512 four[2];
  KVASS_UNROLL for (int k = 0; k < 2; k++) {
    __m512 two[2];
    KVASS_UNROLL for (int j = 0; j < 2; j++) {
      const __m512 a = of[4 * k + 2 * j].part[0], b = of[4 * k + 2 * j + 1].part[0];
      two[j] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    const __m512d a = _mm512_castps_pd(two[0]), b = _mm512_castps_pd(two[1]);
    four[k] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const __m512 all = _mm512_max_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                                   _mm512_shuffle_f32x4(four[0], four[1], 0xEE));
  return {_mm512_max_ps(_mm512_shuffle_f32x4(all, all, 0x88),
                        _mm512_shuffle_f32x4(all, all, 0xDD))};
}

// Raises the greatest scores of `count` query heads to `most`; `kept` is 2**(the old one - the new).
// Memory of eight at once is read and written.
KVASS_INLINE void raise(Floats* most, int64_t count, float* greatest_so_far, float* kept) {
  for (int64_t i = count; i % 8; i++) most[i] = most[count - 1];
  for (int64_t i = 0; i < count; i += 8) {
    const __mmask16 ours = static_cast<__mmask16>((1u << (count - i < 8 ? count - i : 8)) - 1);
    const Floats before = {_mm512_maskz_loadu_ps(ours, greatest_so_far + i)};
    const Floats after = greater(greatest_lanes(most + i), before);
    _mm512_mask_storeu_ps(greatest_so_far + i, ours, after.part[0]);
    _mm512_mask_storeu_ps(kept + i, ours, power_of_two(before - after).part[0]);
  }
}

// Turns one query head's scores into weights for values; `most` is as great as any of them. Adds the
// weights' sum to `lanes`.
template <bool has_scales>
KVASS_INLINE Floats weights_of(const float* scores, int64_t strips, float most,
                               const ValueScales& values, Floats lanes, Unit* out) {
  KVASS_UNROLL for (int i = 0; i < kStrips; i += kUnit) {
    if (i >= strips) break;
    Floats weight[kUnit] = {};
    KVASS_UNROLL for (int k = 0; k < kUnit; k++) {
      if (i + k >= strips) break;
      weight[k] = weight_of(load(scores + (i + k) * kLanes) - splat(most));
      if constexpr (has_scales) weight[k] = weight[k] * load(values.scale + (i + k) * kLanes);
    }
    const Units units = rounded(weight[0], weight[1]);
    store(out + i * kLanes / kUnit, units);
    if constexpr (has_scales) {
      lanes = fused(firsts(units), load(values.inverse + i * kLanes), lanes);
      lanes = fused(seconds(units), load(values.inverse + (i + 1) * kLanes), lanes);
    } else {
      lanes = lanes + firsts(units) + seconds(units);
    }
  }
  return lanes;
}

}  // namespace
