// int4 rows as units: a number is its code times its group's scale plus the group's least number, in
// float32, rounded once. Where a unit is a pair, it is rounded to bf16 then.
//
// Decoding 16 rows asks memory for 16 others, `ahead`, as in codes.h.

#pragma once

#include "paged.h"
#include "units.h"

namespace {

constexpr int64_t kGroupsMax = kHeadMax / 16;

// 16 positions' scales and least numbers of one head: [group][position].
struct GroupScales {
  alignas(64) float scale[kGroupsMax * kLanes], least[kGroupsMax * kLanes];

  // Reads bf16: the positions' scales of one group after the other, then their least numbers; each
  // group's side by side, `step` bytes from one to the next.
  KVASS_INLINE void read(const unsigned char* from, int64_t step, int64_t groups) {
    for (int64_t of = 0; of < groups; of++) {
      store(scale + of * kLanes, Codes<kBf16>::decode(from + of * step));
      store(least + of * kLanes, Codes<kBf16>::decode(from + (groups + of) * step));
    }
  }
  // At least the largest magnitudes of rows; a NaN where there is one.
  KVASS_INLINE Floats largest(int64_t groups) const {
    const Ints magnitude = splat_int(0x7fffffff);
    Floats sum = splat(0.0f);
    for (int64_t i = 0; i < groups * kLanes; i += kLanes)
      sum = sum + from_bits(bits_of(load(scale + i)) & magnitude) * splat(15.0f) +
            from_bits(bits_of(load(least + i)) & magnitude);
    return sum;
  }
  // Makes all numbers of a position zeros.
  void clear(int64_t position, int64_t groups) {
    for (int64_t of = 0; of < groups; of++)
      scale[of * kLanes + position] = least[of * kLanes + position] = 0;
  }
};

// Decodes 16 rows of `numbers` to out[number][row].
KVASS_INLINE void decode_turned_rows(const unsigned char* rows, const GroupScales& by,
                                     int64_t numbers, float* out, int64_t out_step,
                                     const unsigned char* ahead) {
  const int64_t step = numbers / 2, group = code_group(numbers);
  alignas(64) unsigned char turned[16 * 16];
  // Of a last column that only half belongs to the rows the other half is not looked at.
  for (int64_t done = 0; done < step; done += 16) {
    turn_over<Narrow, 1>(rows + done, step, turned);
    KVASS_UNROLL for (int i = 0; i < 4; i++) ask_for(ahead + 16 * done + 64 * i);
    for (int half = 0; half < 2 && done + 8 * half < step; half++) {
      const int64_t first = 2 * done + 16 * half, of = first / group;
      const Floats scale = load(by.scale + of * kLanes), least = load(by.least + of * kLanes);
      KVASS_UNROLL for (int i = 0; i < 8; i++) {
        const unsigned char* at = turned + 16 * (8 * half + i);
        float* to = out + (first + 2 * i) * out_step;
        store(to, fused(Codes<kInt4>::low(at), scale, least));
        store(to + out_step, fused(Codes<kInt4>::high(at), scale, least));
      }
    }
  }
}

// Decodes 16 rows of `numbers` to out[row][number].
KVASS_INLINE void decode_rows(const unsigned char* rows, const GroupScales& by, int64_t numbers,
                              float* out, const unsigned char* ahead) {
  const int64_t group = code_group(numbers), groups = numbers / group;
  for (int64_t row = 0; row < kLanes; row++)
    for (int64_t of = 0; of < groups; of++) {
      const int64_t first = row * numbers + of * group;
      if (first % 128 == 0) ask_for(ahead + first / 2);
      const Floats scale = splat(by.scale[of * kLanes + row]);
      const Floats least = splat(by.least[of * kLanes + row]);
      for (int64_t i = first; i < first + group; i += kLanes)
        store(out + i, fused(Codes<kInt4>::decode(rows + i / 2), scale, least));
    }
}

#if defined(__AVX512BF16__)

// The bf16 of each of a group's 16 codes at one position, then of each of another's.
KVASS_INLINE __m512i numbers_of(const GroupScales& by, int64_t one, int64_t other) {
  const Floats codes = {_mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)};
  return rounded(fused(codes, splat(by.scale[one]), splat(by.least[one])),
                 fused(codes, splat(by.scale[other]), splat(by.least[other])))
      .both;
}

// Decodes 16 rows of `numbers` to out[number / 2][row]: a byte is a pair.
KVASS_INLINE void decode_turned_rows(const unsigned char* rows, const GroupScales& by,
                                     int64_t numbers, Unit* out, int64_t out_step,
                                     const unsigned char* ahead) {
  if (code_group(numbers) != 32) {
    alignas(64) float turned[kHeadMax * kLanes];
    decode_turned_rows(rows, by, numbers, turned, kLanes, ahead);
    pack_turned(turned, numbers, out, out_step);
    return;
  }
  for (int64_t at = 0; at < numbers / 2; at += 16) {
    __m512i words[16];
    KVASS_UNROLL for (int i = 0; i < 16; i++) {
      if (i < 4) ask_for(ahead + 16 * at + 64 * i);
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(rows + i * numbers / 2 + at));
      const __m512i wide = _mm512_cvtepu8_epi32(bytes);
      // Of an index the lowest five bits count, and with one group twice the lowest four.
      const __m512i codes = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 12));
      const int64_t of = at + i;  // 16 bytes are a group, and 16 positions a group's scales
      words[i] = _mm512_permutexvar_epi16(codes, numbers_of(by, of, of));
    }
    turn_over(words);
    KVASS_UNROLL for (int i = 0; i < 16; i++, out += out_step) store(out, Units{words[i]});
  }
}

// Indices: from two rows' 16 bytes, to bytes 0 and 2 of each 32 bits the two rows' byte with a number,
// of 16 numbers from `first` on.
constexpr Order bytes_side_by_side(int first) {
  Order order{};
  for (int i = 0; i < 64; i++)
    order.at[i] = static_cast<uint8_t>((first + i / 4) / 2 + i % 4 / 2 * 16);
  return order;
}
constexpr Order kByteSides[2] = {bytes_side_by_side(0), bytes_side_by_side(16)};

// Decodes 16 rows of `numbers` to out[row / 2][number].
KVASS_INLINE void decode_rows(const unsigned char* rows, const GroupScales& by, int64_t numbers,
                              Unit* out, const unsigned char* ahead) {
  if (code_group(numbers) != 32) {
    alignas(64) float decoded[kLanes * kHeadMax];
    decode_rows(rows, by, numbers, decoded, ahead);
    pack_rows(decoded, numbers, out);
    return;
  }
  const int64_t step = numbers / 2;
  const __m512i shifts = _mm512_set1_epi64(int64_t{4} << 32);
  const __m512i half_byte = _mm512_set1_epi32(0x000f000f), other = _mm512_set1_epi32(0x00100000);
  for (int64_t row = 0; row < kLanes; row += kUnit)
    for (int64_t at = 0; at < step; at += 16) {
      const unsigned char* from = rows + row * step + at;
      if ((row * step + 2 * at) % 64 == 0) ask_for(ahead + row * step + 2 * at);
      const __m512i both = _mm512_castsi256_si512(
          _mm256_loadu2_m128i((const __m128i*)(from + step), (const __m128i*)from));
      const __m512i found = numbers_of(by, at + row, at + row + 1);
      KVASS_UNROLL for (int half = 0; half < 2; half++, out += kLanes) {
        const __m512i order = _mm512_load_si512(kByteSides[half].at);
        const __m512i codes = _mm512_srlv_epi32(_mm512_permutexvar_epi8(order, both), shifts);
        // codes & half_byte | other
        const __m512i at_codes = _mm512_ternarylogic_epi32(codes, half_byte, other, 0xEA);
        store(out, Units{_mm512_permutexvar_epi16(at_codes, found)});
      }
    }
}

#endif

}  // namespace
