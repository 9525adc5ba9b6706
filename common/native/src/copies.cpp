// Copying blocks and summing them in one pass over memory.
//
// The checksum is XXH3-64 with its default secret (Collet, xxhash_spec.md 0.2, "large inputs"): the
// one that Python's xxhash gives, and tests compare the two. It is written out here because a
// library's takes a pass of its own over bytes that a copy has just moved: fused with the copy, whose
// stores go past the cache, it costs nothing beside the memory's own time.

#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "level.h"

namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5, kPrimeMix = 0x165667919E3779F9;
constexpr uint64_t kStripe = 64, kStripes = 16, kBlock = kStripe * kStripes;
constexpr uint64_t kPiece = 128 << 10;  // of a read: what a second-level cache still has when summed
constexpr uint64_t kAhead = 2048;

alignas(64) constexpr unsigned char kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const unsigned char* at) {
  uint64_t value;
  memcpy(&value, at, 8);
  return value;
}

// --- eight accumulators, and stripes of 64 bytes ---

#if defined(__AVX512F__)

struct Lanes {
  __m512i value;
};
using Stripe = __m512i;

Lanes start() {
  return {_mm512_setr_epi64(kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2,
                            kPrime64_5, kPrime32_1)};
}
Stripe load(const unsigned char* at) { return _mm512_loadu_si512(at); }
void store(unsigned char* at, Stripe stripe) { _mm512_storeu_si512(at, stripe); }
void store_past_cache(unsigned char* at, Stripe stripe) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at), stripe);
}
void add(Lanes& lanes, Stripe stripe, const unsigned char* secret) {
  const __m512i key = _mm512_xor_si512(stripe, _mm512_loadu_si512(secret));
  const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
  const __m512i swapped = _mm512_shuffle_epi32(stripe, _MM_PERM_BADC);
  lanes.value = _mm512_add_epi64(lanes.value, _mm512_add_epi64(product, swapped));
}
void scramble(Lanes& lanes) {
  const __m512i prime = _mm512_set1_epi64(kPrime32_1);
  __m512i value = _mm512_xor_si512(lanes.value, _mm512_srli_epi64(lanes.value, 47));
  value = _mm512_xor_si512(value, _mm512_loadu_si512(kSecret + 128));
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(value, 32), prime);
  lanes.value = _mm512_add_epi64(_mm512_mul_epu32(value, prime), _mm512_slli_epi64(high, 32));
}
void read(const Lanes& lanes, uint64_t out[8]) { _mm512_storeu_si512(out, lanes.value); }

#elif defined(__AVX2__)

struct Lanes {
  __m256i value[2];
};
struct Stripe {
  __m256i half[2];
};

Lanes start() {
  return {{_mm256_setr_epi64x(kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3),
           _mm256_setr_epi64x(kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1)}};
}
__m256i load_half(const unsigned char* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}
Stripe load(const unsigned char* at) { return {{load_half(at), load_half(at + 32)}}; }
void store(unsigned char* at, Stripe stripe) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), stripe.half[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + 32), stripe.half[1]);
}
void store_past_cache(unsigned char* at, Stripe stripe) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at), stripe.half[0]);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at + 32), stripe.half[1]);
}
void add(Lanes& lanes, Stripe stripe, const unsigned char* secret) {
  for (int i = 0; i < 2; i++) {
    const __m256i key = _mm256_xor_si256(stripe.half[i], load_half(secret + 32 * i));
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    const __m256i swapped = _mm256_shuffle_epi32(stripe.half[i], _MM_SHUFFLE(1, 0, 3, 2));
    lanes.value[i] = _mm256_add_epi64(lanes.value[i], _mm256_add_epi64(product, swapped));
  }
}
void scramble(Lanes& lanes) {
  const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
  for (int i = 0; i < 2; i++) {
    __m256i value = _mm256_xor_si256(lanes.value[i], _mm256_srli_epi64(lanes.value[i], 47));
    value = _mm256_xor_si256(value, load_half(kSecret + 128 + 32 * i));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
    lanes.value[i] = _mm256_add_epi64(_mm256_mul_epu32(value, prime), _mm256_slli_epi64(high, 32));
  }
}
void read(const Lanes& lanes, uint64_t out[8]) { memcpy(out, lanes.value, 64); }

#else

struct Lanes {
  uint64_t value[8];
};
struct Stripe {
  uint64_t part[8];
};

Lanes start() {
  return {{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5,
           kPrime32_1}};
}
Stripe load(const unsigned char* at) {
  Stripe stripe;
  memcpy(stripe.part, at, 64);
  return stripe;
}
void store(unsigned char* at, const Stripe& stripe) { memcpy(at, stripe.part, 64); }
void store_past_cache(unsigned char* at, const Stripe& stripe) { store(at, stripe); }
void add(Lanes& lanes, const Stripe& stripe, const unsigned char* secret) {
  for (int i = 0; i < 8; i++) {
    const uint64_t key = stripe.part[i] ^ word(secret + 8 * i);
    lanes.value[i] += (key & 0xffffffff) * (key >> 32) + stripe.part[i ^ 1];
  }
}
void scramble(Lanes& lanes) {
  for (int i = 0; i < 8; i++) {
    const uint64_t value = lanes.value[i] ^ (lanes.value[i] >> 47) ^ word(kSecret + 128 + 8 * i);
    lanes.value[i] = value * kPrime32_1;
  }
}
void read(const Lanes& lanes, uint64_t out[8]) { memcpy(out, lanes.value, 64); }

#endif

void fence() {
#if defined(__x86_64__)
  _mm_sfence();  // stores that go past the cache are in no order with others
#endif
}

void prefetch(const unsigned char* at) { __builtin_prefetch(at); }

// --- one range ---

enum class To { kNowhere, kCache, kMemory };

template <To to>
void stripe_over(Lanes& lanes, const unsigned char* from, unsigned char* into, uint64_t number) {
  const Stripe stripe = load(from);
  if constexpr (to == To::kCache) store(into, stripe);
  if constexpr (to == To::kMemory) store_past_cache(into, stripe);
  add(lanes, stripe, kSecret + 8 * number);
}

// Adds whole blocks of 1,024 bytes, of which others follow.
template <To to>
void add_blocks(Lanes& lanes, const unsigned char* from, unsigned char* into, uint64_t count) {
  for (uint64_t block = 0; block < count; block++, from += kBlock) {
    for (uint64_t i = 0; i < kStripes; i++) {
      if constexpr (to != To::kNowhere) prefetch(from + kStripe * i + kAhead);
      stripe_over<to>(lanes, from + kStripe * i, into + kStripe * i, i);
    }
    scramble(lanes);
    if constexpr (to != To::kNowhere) into += kBlock;
  }
}

// Adds what is left after whole blocks, at least one byte, and returns the sum of all `size` bytes.
template <To to>
uint64_t finish(Lanes lanes, const unsigned char* from, unsigned char* into, uint64_t left,
                uint64_t size) {
  const uint64_t stripes = (left - 1) / kStripe;
  for (uint64_t i = 0; i < stripes; i++)
    stripe_over<to>(lanes, from + kStripe * i, into + kStripe * i, i);
  const Stripe last = load(from + left - kStripe);  // it overlaps the one before
  if constexpr (to != To::kNowhere) {
    // No byte before the range's first is written: `size` is more than a stripe, so these are its.
    store(into + left - kStripe, last);
  }
  add(lanes, last, kSecret + 192 - kStripe - 7);
  uint64_t value[8];
  read(lanes, value);
  uint64_t sum = size * kPrime64_1;
  for (int i = 0; i < 4; i++) {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(value[2 * i] ^ word(kSecret + 11 + 16 * i)) *
        (value[2 * i + 1] ^ word(kSecret + 19 + 16 * i));
    sum += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  sum ^= sum >> 37;
  sum *= kPrimeMix;
  return sum ^ (sum >> 32);
}

template <To to>
uint64_t sum_range(const unsigned char* from, unsigned char* into, uint64_t size) {
  Lanes lanes = start();
  const uint64_t blocks = (size - 1) / kBlock, done = blocks * kBlock;
  add_blocks<to>(lanes, from, into, blocks);
  return finish<to>(lanes, from + done, to == To::kNowhere ? into : into + done, size - done, size);
}

// Reads a range of another process and sums it; false when not all of it came (errno says why).
bool read_range(int pid, uint64_t source, unsigned char* into, uint64_t size, uint64_t* sum) {
  Lanes lanes = start();
  const uint64_t blocks = (size - 1) / kBlock;
  for (uint64_t done = 0, summed = 0; done < size;) {
    const uint64_t part = size - done < kPiece ? size - done : kPiece;
    const iovec local{into + done, part};
    const iovec remote{reinterpret_cast<void*>(source + done), part};
    errno = 0;
    const ssize_t copied = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (copied != static_cast<ssize_t>(part)) {
      if (copied >= 0) errno = EFAULT;
      return false;
    }
    done += part;
    const uint64_t whole = done / kBlock < blocks ? done / kBlock : blocks;
    add_blocks<To::kNowhere>(lanes, into + summed * kBlock, nullptr, whole - summed);
    summed = whole;
  }
  *sum = finish<To::kNowhere>(lanes, into + blocks * kBlock, nullptr, size - blocks * kBlock, size);
  return true;
}

}  // namespace

// Ranges are `groups` times `group_size` bytes (more than 240), one after the other from each address
// on; `sums` takes one value a group, range by range.

// Sums ranges.
KVASS_PUBLIC void KVASS_AT(kvass_sum)(uint64_t count, const uint64_t* sources, uint64_t group_size,
                                      uint64_t groups, uint64_t* sums) {
  for (uint64_t i = 0; i < count; i++)
    for (uint64_t group = 0; group < groups; group++) {
      const auto* from = reinterpret_cast<const unsigned char*>(sources[i] + group * group_size);
      sums[i * groups + group] = sum_range<To::kNowhere>(from, nullptr, group_size);
    }
}

// Copies ranges that do not overlap and sums what was copied.
KVASS_PUBLIC void KVASS_AT(kvass_copy_sum)(uint64_t count, const uint64_t* targets,
                                           const uint64_t* sources, uint64_t group_size,
                                           uint64_t groups, uint64_t* sums) {
  for (uint64_t i = 0; i < count; i++)
    for (uint64_t group = 0; group < groups; group++) {
      const auto* from = reinterpret_cast<const unsigned char*>(sources[i] + group * group_size);
      auto* into = reinterpret_cast<unsigned char*>(targets[i] + group * group_size);
      const bool aligned = reinterpret_cast<uintptr_t>(into) % kStripe == 0;
      sums[i * groups + group] = aligned ? sum_range<To::kMemory>(from, into, group_size)
                                         : sum_range<To::kCache>(from, into, group_size);
    }
  fence();
}

// Copies ranges out of another process and sums what came. Returns how many ranges are whole; when
// not all are, `error` is why.
KVASS_PUBLIC uint64_t KVASS_AT(kvass_read_sum)(int pid, uint64_t count, const uint64_t* targets,
                                               const uint64_t* sources, uint64_t group_size,
                                               uint64_t groups, uint64_t* sums, int* error) {
  *error = 0;
  for (uint64_t i = 0; i < count; i++)
    for (uint64_t group = 0; group < groups; group++) {
      const uint64_t offset = group * group_size;
      auto* into = reinterpret_cast<unsigned char*>(targets[i] + offset);
      if (!read_range(pid, sources[i] + offset, into, group_size, &sums[i * groups + group])) {
        *error = errno;
        return i;
      }
    }
  return count;
}
