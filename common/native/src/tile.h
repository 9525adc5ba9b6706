// One key tile: its K and V as float32, and what some query heads make of it.
//
// All of attention's arithmetic that depends on stored numbers is here, for one row and for many: a
// score is a sum over the head's numbers in ascending order, an output a sum over keys in ascending
// order. How many query heads are computed at once changes no sum.

#pragma once

#include "paged.h"

namespace {

constexpr int kTile = 64, kStrips = kTile / kLanes;  // positions, at absolute multiples
constexpr int64_t kAhead = kTile;
constexpr int kPartsMax = 2 * kHeadMax / 16;  // of a row's scales: int4's, in groups of 16
constexpr float kNothing = -1.0e30f;  // the greatest score of no keys; finite, as are differences
constexpr float kMasked = -2.0e30f;   // weighs 0 beside any greatest score

// What the registers hold: rows of accumulators, and vectors of each.
#if defined(__AVX512F__)
constexpr int kBlockRows = 6, kBlockVectors = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kBlockRows = 6, kBlockVectors = 1;
#else
constexpr int kBlockRows = 3, kBlockVectors = 1;
#endif

struct Tile {
  alignas(64) float keys[kHeadMax * kTile];    // [number][position]
  alignas(64) float values[kTile * kHeadMax];  // [position][number]
  alignas(64) float key_scales[kTile], value_scales[kTile];
  int64_t start, count;  // positions from `start`, all there is
};

// Where a tile's numbers come from: a table's slots, one head, and the positions [first, limit) whose
// numbers may be looked at. Others may be anything: they read as zeros.
struct Source {
  const Pool* pool;
  const int64_t* table;
  Place place;
  int64_t first, limit;
};

struct Strip {
  const unsigned char* codes[2];
  const unsigned char* scales[2];
  int64_t scale_step;  // from one part to the next
};

// Copies what there is of 16 positions, with zeros for the rest.
void gather(const Source& source, int64_t start, unsigned char* codes, unsigned char* scales) {
  const Pool& pool = *source.pool;
  const int64_t row = pool.row_size, parts = pool.scale_parts;
  memset(codes, 0, 2 * kLanes * row);
  memset(scales, 0, 2 * parts * kLanes * 2);
  for (int64_t i = 0; i < kLanes; i++) {
    const int64_t position = start + i;
    if (position < source.first || position >= source.limit) continue;
    const int64_t offset = position % pool.block_tokens;
    const unsigned char* slot =
        pool.memory + source.table[position / pool.block_tokens] * pool.block_size;
    for (int value = 0; value < 2; value++) {
      memcpy(codes + (value * kLanes + i) * row, slot + source.place.codes[value] + offset * row, row);
      for (int64_t part = 0; part < parts; part++)
        memcpy(scales + ((value * parts + part) * kLanes + i) * 2,
               slot + source.place.scales[value] + (part * pool.block_tokens + offset) * 2, 2);
    }
  }
}

// Finds 16 positions' numbers where they lie in a row; false where they must be gathered.
KVASS_INLINE bool find(const Source& source, int64_t start, Strip* strip) {
  const Pool& pool = *source.pool;
  if (pool.block_tokens % kLanes || start < source.first || start + kLanes > source.limit)
    return false;
  const int64_t offset = start % pool.block_tokens;
  const unsigned char* slot = pool.memory + source.table[start / pool.block_tokens] * pool.block_size;
  for (int value = 0; value < 2; value++) {
    strip->codes[value] = slot + source.place.codes[value] + offset * pool.row_size;
    strip->scales[value] = slot + source.place.scales[value] + offset * 2;
  }
  strip->scale_step = pool.block_tokens * 2;
  return true;
}

// Decodes the tile at `start`, and asks memory for what comes `kAhead` positions later. `known_dim` is
// head_dim where the compiler shall know it, else 0.
template <class Code, int known_dim>
void fill_with(const Source& source, int64_t start, Tile* tile) {
  const int64_t head_dim = known_dim ? known_dim : source.pool->head_dim;
  const Pool& pool = *source.pool;
  const int64_t size = kLanes * pool.row_size, scales_size = kLanes * pool.scale_parts * 2;
  alignas(64) unsigned char gathered[2 * kLanes * kHeadMax * 2], scales[2 * kLanes * kPartsMax * 2];
  tile->start = start;
  tile->count = source.limit - start < kTile ? source.limit - start : kTile;
  for (int64_t at = 0; at < tile->count; at += kLanes) {
    Strip strip, ahead;
    if (!find(source, start + at, &strip)) {
      gather(source, start + at, gathered, scales);
      strip = {{gathered, gathered + size}, {scales, scales + scales_size}, 2 * kLanes};
    }
    if (!find(source, start + kAhead + at, &ahead)) ahead = strip;  // asking for it costs little
    ask_for(ahead.scales[0]);
    ask_for(ahead.scales[1]);
    if constexpr (Code::kGrouped) {
      const Scales scale[2] = {{strip.scales[0], strip.scale_step}, {strip.scales[1], strip.scale_step}};
      decode_turned_rows(strip.codes[0], scale[0], head_dim, tile->keys + at, kTile, ahead.codes[0]);
      decode_rows(strip.codes[1], scale[1], head_dim, tile->values + at * head_dim, ahead.codes[1]);
    } else {
      decode_turned_rows<Code>(strip.codes[0], head_dim, tile->keys + at, kTile, ahead.codes[0]);
      decode_rows<Code>(strip.codes[1], head_dim, tile->values + at * head_dim, ahead.codes[1]);
    }
    if constexpr (Code::kScaled) {
      const Floats factor = splat(Code::kFactor);
      store(tile->key_scales + at, Codes<kBf16>::decode(strip.scales[0]) * factor);
      store(tile->value_scales + at, Codes<kBf16>::decode(strip.scales[1]) * factor);
    }
  }
}

template <class Code>
void fill(const Source& source, int64_t start, Tile* tile) {
  if (source.pool->head_dim == 64) return fill_with<Code, 64>(source, start, tile);
  if (source.pool->head_dim == 128) return fill_with<Code, 128>(source, start, tile);
  fill_with<Code, 0>(source, start, tile);
}

// out[row] = out[row] * factor[row] + sum over k, ascending, of left[row][k] * right[k]; without
// factors, from 0. `left` and `out` have rows of `left_step` and `out_step`, `right` of `right_step`.
template <int rows, int vectors, bool scaled>
KVASS_INLINE void multiply_block(const float* left, int64_t left_step, const float* right,
                                 int64_t right_step, int64_t depth, const float* factor, float* out,
                                 int64_t out_step) {
  Floats sum[rows][vectors];
  KVASS_UNROLL for (int r = 0; r < rows; r++) {
    KVASS_UNROLL for (int v = 0; v < vectors; v++) {
      sum[r][v] = splat(0.0f);
      if (scaled) sum[r][v] = load(out + r * out_step + v * kLanes) * splat(factor[r]);
    }
  }
  for (int64_t k = 0; k < depth; k++) {
    Floats b[vectors];
    KVASS_UNROLL for (int v = 0; v < vectors; v++) b[v] = load(right + k * right_step + v * kLanes);
    KVASS_UNROLL for (int r = 0; r < rows; r++) {
      const Floats a = splat(left[r * left_step + k]);
      KVASS_UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = fused(a, b[v], sum[r][v]);
    }
  }
  KVASS_UNROLL for (int r = 0; r < rows; r++) {
    KVASS_UNROLL for (int v = 0; v < vectors; v++)
      store(out + r * out_step + v * kLanes, sum[r][v]);
  }
}

template <int rows, int vectors, bool scaled>
void multiply_columns(const float* left, int64_t left_step, const float* right, int64_t right_step,
                      int64_t depth, int64_t columns, const float* factor, float* out,
                      int64_t out_step) {
  int64_t done = 0;
  for (; done + vectors <= columns; done += vectors)
    multiply_block<rows, vectors, scaled>(left, left_step, right + done * kLanes, right_step, depth,
                                          factor, out + done * kLanes, out_step);
  if constexpr (vectors > 1)
    multiply_columns<rows, vectors - 1, scaled>(left, left_step, right + done * kLanes, right_step,
                                                depth, columns - done, factor, out + done * kLanes,
                                                out_step);
}

// `rows` is at most kBlockRows; `columns` counts vectors.
template <bool scaled, int most = kBlockRows>
void multiply(int64_t rows, const float* left, int64_t left_step, const float* right,
              int64_t right_step, int64_t depth, int64_t columns, const float* factor, float* out,
              int64_t out_step) {
  if (rows == most)
    multiply_columns<most, kBlockVectors, scaled>(left, left_step, right, right_step, depth, columns,
                                                  factor, out, out_step);
  else if constexpr (most > 1)
    multiply<scaled, most - 1>(rows, left, left_step, right, right_step, depth, columns, factor, out,
                               out_step);
}

// A query head's softmax so far: the greatest score, and the sum of weights, lane by lane.
struct Sum {
  Floats lanes;
  float greatest;
};

// Turns one query head's products with the tile's keys into weights for its values, in place; scores
// are in units of log2(e). It sees positions [low, high) of the tile. Returns what its output so far
// is to be multiplied by.
template <bool has_scales>
KVASS_INLINE float weigh(const Tile& tile, int64_t low, int64_t high, float soft_cap, float* scores,
                         Sum* sum) {
  const int64_t strips = (tile.count + kLanes - 1) / kLanes;
  const bool masked = low > 0 || high < strips * kLanes;
  Floats score[kStrips], most = splat(kNothing);
  KVASS_UNROLL for (int i = 0; i < kStrips; i++) {
    if (i >= strips) break;
    score[i] = load(scores + i * kLanes);
    if constexpr (has_scales) score[i] = score[i] * load(tile.key_scales + i * kLanes);
    if (soft_cap != 0)
      score[i] = splat(soft_cap) * tanh_of(score[i] / splat(soft_cap));
    if (masked) {
      const Ints position = count_from(i * kLanes);
      score[i] = select(position < splat_int(static_cast<int32_t>(low)), splat(kMasked), score[i]);
      score[i] = select(position < splat_int(static_cast<int32_t>(high)), score[i], splat(kMasked));
    }
    most = greater(score[i], most);
  }
  const float before = sum->greatest, now = greatest(most);
  const float after = now > before ? now : before;
  const float kept = power_of_two(before - after);
  Floats lanes = sum->lanes * splat(kept);
  KVASS_UNROLL for (int i = 0; i < kStrips; i++) {
    if (i >= strips) break;
    const Floats weight = power_of_two(score[i] - splat(after));
    lanes = lanes + weight;
    if constexpr (has_scales)
      store(scores + i * kLanes, weight * load(tile.value_scales + i * kLanes));
    else
      store(scores + i * kLanes, weight);
  }
  *sum = {lanes, after};
  return kept;
}

}  // namespace
