// One key tile: its K and V as units, and what some query heads make of it.
//
// All of attention's arithmetic that depends on stored numbers is here, for one row and for many: a
// score is a sum over the head's units in ascending order, an output a sum over units of keys in
// ascending order. How many query heads are computed at once changes no sum.
//
// What a row does not see changes no bit of it, whatever is stored there: its score is replaced, and
// V is finite in a tile (`mark`, `mend`), so that a weight of 0 takes it away.

#pragma once

#include "groups.h"

namespace {

constexpr int64_t kAhead = kTile;
constexpr int64_t kQueriesMax = 192;  // of one KV head in a group: what a decoded tile is used for
constexpr int64_t kPartsMax = 2 * kGroupsMax;  // of a row's scales
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
  alignas(64) Unit keys[kHeadMax / kUnit * kTile];    // [unit of numbers][position]
  alignas(64) Unit values[kTile / kUnit * kHeadMax];  // [unit of positions][number]
  alignas(64) float key_scales[kTile];
  ValueScales values_by;
  int64_t start, count;  // positions from `start`, all there is
  const unsigned char* ahead[2][kHeadMax];  // lines of K and V of the next tile, to be asked for
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

// Whether any of some bf16 numbers is not finite.
bool any_broken(const unsigned char* numbers, int64_t size) {
  uint32_t found = 0;
  for (int64_t i = 0; i < size; i += 2) {
    uint16_t bits;
    memcpy(&bits, numbers + i, 2);
    found |= (bits & 0x7f80) == 0x7f80;
  }
  return found != 0;
}

// Copies 16 positions of bf16, with zeros for a V that is not finite, and a NaN in its K: rows that
// see the position get NaN.
void mend(const unsigned char* const* codes, int64_t row, unsigned char* copy) {
  memcpy(copy, codes[0], kLanes * row);
  memcpy(copy + kLanes * row, codes[1], kLanes * row);
  const uint16_t nan = 0x7fc0;
  for (int64_t i = 0; i < kLanes; i++) {
    unsigned char* value = copy + (kLanes + i) * row;
    if (!any_broken(value, row)) continue;
    memset(value, 0, row);
    memcpy(copy + i * row, &nan, 2);
  }
}

// Keeps the scales of 16 positions, and as above: K's is NaN where V's is not finite.
template <class Code>
KVASS_INLINE void mark(const Strip& strip, int64_t at, Tile* tile) {
  const Floats factor = splat(Code::kFactor);
  const Floats key = Codes<kBf16>::decode(strip.scales[0]) * factor;
  const Floats value = Codes<kBf16>::decode(strip.scales[1]) * factor;
  const Ints finite = (bits_of(value) & splat_int(0x7f800000)) < splat_int(0x7f800000);
  store(tile->key_scales + at, select(finite, key, from_bits(splat_int(0x7fc00000))));
  store(tile->values_by.scale + at, select(finite, value, splat(1.0f)));
}

// Decodes 16 positions of int4, and as above: their scales are in the numbers.
void fill_groups(const Strip& strip, const Strip& ahead, int64_t head_dim, Unit* keys, Unit* values) {
  const int64_t groups = head_dim / code_group(head_dim);
  GroupScales by[2];
  for (int value = 0; value < 2; value++) {
    by[value].read(strip.scales[value], strip.scale_step, groups);
    for (int64_t part = 0; part < 2 * groups; part++)
      ask_for(ahead.scales[value] + part * ahead.scale_step);
  }
  alignas(64) float size[kLanes];
  store(size, by[1].largest(groups));
  for (int64_t i = 0; i < kLanes; i++) {
    if (size[i] < 0x1.fep127f) continue;  // what bf16 has
    by[1].clear(i, groups);
    by[0].scale[i] = __builtin_nanf("");
  }
  decode_turned_rows(strip.codes[0], by[0], head_dim, keys, kTile, ahead.codes[0]);
  decode_rows(strip.codes[1], by[1], head_dim, values, ahead.codes[1]);
}

// Decodes the tile at `start`, and asks memory for what comes `kAhead` positions later. `known_dim` is
// head_dim where the compiler shall know it, else 0.
template <class Code, int known_dim>
void fill_with(const Source& source, int64_t start, Tile* tile) {
  const int64_t head_dim = known_dim ? known_dim : source.pool->head_dim;
  const int64_t row = row_size<Code>(head_dim), size = kLanes * row;
  const int64_t scales_size = kLanes * source.pool->scale_parts * 2;
  alignas(64) unsigned char gathered[2 * kLanes * kHeadMax * 2], scales[2 * kLanes * kPartsMax * 2];
  alignas(64) unsigned char mended[Code::kScaled || Code::kGrouped ? 64 : sizeof(gathered)];
  tile->start = start;
  tile->count = source.limit - start < kTile ? source.limit - start : kTile;
  for (int64_t at = 0; at < tile->count; at += kLanes) {
    Strip strip, ahead;
    if (!find(source, start + at, &strip)) {
      gather(source, start + at, gathered, scales);
      strip = {{gathered, gathered + size}, {scales, scales + scales_size}, 2 * kLanes};
    }
    if (!find(source, start + kAhead + at, &ahead)) ahead = strip;  // asking for it costs little
    if constexpr (Code::kGrouped) {
      fill_groups(strip, ahead, head_dim, tile->keys + at, tile->values + at / kUnit * head_dim);
    } else {
      if constexpr (Code::kScaled) {
        ask_for(ahead.scales[0]);
        ask_for(ahead.scales[1]);
        mark<Code>(strip, at, tile);
      } else if (any_broken(strip.codes[1], size)) {
        mend(strip.codes, row, mended);
        strip.codes[0] = mended;
        strip.codes[1] = mended + size;
      }
      if constexpr (kAsks<Code> > 0)
        for (int value = 0; value < 2; value++)
          for (int64_t i = 0; i < row / kStrips / 2; i++)
            tile->ahead[value][at / kLanes * row / kStrips / 2 + i] =
                ahead.codes[value] + size / 2 + 64 * i;
      decode_turned_rows<Code>(strip.codes[0], head_dim, tile->keys + at, kTile, ahead.codes[0]);
      decode_rows<Code>(strip.codes[1], head_dim, tile->values + at / kUnit * head_dim,
                        ahead.codes[1]);
    }
  }
  if constexpr (Code::kScaled) tile->values_by.finish(tile->count);
}

template <class Code>
void fill(const Source& source, int64_t start, Tile* tile) {
  if (source.pool->head_dim == 64) return fill_with<Code, 64>(source, start, tile);
  if (source.pool->head_dim == 128) return fill_with<Code, 128>(source, start, tile);
  fill_with<Code, 0>(source, start, tile);
}

// out[row] = out[row] * factor[row] + sum over k, ascending, of left[row][k] * right[k]; without
// factors, from 0. `left` and `out` have rows of `left_step` and `out_step`, `right` of `right_step`.
// Asks for so many lines of `ahead` a k.
template <int rows, int vectors, bool scaled, int asks>
KVASS_INLINE void multiply_block(const Unit* left, int64_t left_step, const Unit* right,
                                 int64_t right_step, int64_t depth, const float* factor, float* out,
                                 int64_t out_step, const unsigned char* const* ahead) {
  Floats sum[rows][vectors];
  KVASS_UNROLL for (int r = 0; r < rows; r++) {
    KVASS_UNROLL for (int v = 0; v < vectors; v++) {
      sum[r][v] = splat(0.0f);
      if (scaled) sum[r][v] = load(out + r * out_step + v * kLanes) * splat(factor[r]);
    }
  }
  for (int64_t k = 0; k < depth; k++) {
    KVASS_UNROLL for (int i = 0; i < asks; i++) ask_for(ahead[k * asks + i]);
    Units b[vectors];
    KVASS_UNROLL for (int v = 0; v < vectors; v++) b[v] = load(right + k * right_step + v * kLanes);
    KVASS_UNROLL for (int r = 0; r < rows; r++) {
      const Units a = splat(left[r * left_step + k]);
      KVASS_UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = fused(a, b[v], sum[r][v]);
    }
  }
  KVASS_UNROLL for (int r = 0; r < rows; r++) {
    KVASS_UNROLL for (int v = 0; v < vectors; v++)
      store(out + r * out_step + v * kLanes, sum[r][v]);
  }
}

template <int rows, int vectors, bool scaled, int asks>
void multiply_columns(const Unit* left, int64_t left_step, const Unit* right, int64_t right_step,
                      int64_t depth, int64_t columns, const float* factor, float* out,
                      int64_t out_step, const unsigned char* const* ahead) {
  int64_t done = 0;
  for (; done + vectors <= columns; done += vectors, ahead += depth * asks)
    multiply_block<rows, vectors, scaled, asks>(left, left_step, right + done * kLanes, right_step,
                                                depth, factor, out + done * kLanes, out_step, ahead);
  if constexpr (vectors > 1)
    multiply_columns<rows, vectors - 1, scaled, 0>(left, left_step, right + done * kLanes, right_step,
                                                   depth, columns - done, factor,
                                                   out + done * kLanes, out_step, ahead);
}

// `rows` is at most kBlockRows; `columns` counts vectors.
template <bool scaled, int asks, int most = kBlockRows>
void multiply_rows(int64_t rows, const Unit* left, int64_t left_step, const Unit* right,
                   int64_t right_step, int64_t depth, int64_t columns, const float* factor,
                   float* out, int64_t out_step, const unsigned char* const* ahead) {
  if (rows == most)
    multiply_columns<most, kBlockVectors, scaled, asks>(left, left_step, right, right_step, depth,
                                                        columns, factor, out, out_step, ahead);
  else if constexpr (most > 1)
    multiply_rows<scaled, asks, most - 1>(rows, left, left_step, right, right_step, depth, columns,
                                          factor, out, out_step, ahead);
}

// The same for any number of rows; the first of them ask.
template <bool scaled, int asks>
void multiply(int64_t rows, const Unit* left, int64_t left_step, const Unit* right,
              int64_t right_step, int64_t depth, int64_t columns, const float* factor, float* out,
              int64_t out_step, const unsigned char* const* ahead) {
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int64_t rest = rows - row, count = rest < kBlockRows ? rest : kBlockRows;
    auto* block = row == 0 ? multiply_rows<scaled, asks> : multiply_rows<scaled, 0>;
    block(count, left + row * left_step, left_step, right, right_step, depth, columns,
          scaled ? factor + row : nullptr, out + row * out_step, out_step, ahead);
  }
}

// Query heads' softmax so far: of each the sum of weights, lane by lane, and the greatest score.
struct Sums {
  Floats lanes[kQueriesMax];
  float greatest[kQueriesMax + kLanes];
};

// Positions [low, high) of a tile, which a query head sees.
struct Seen {
  int64_t low, high;
};

// Turns products of some query heads with the tile's keys into scores, in place, in units of log2(e);
// returns the greatest of each lane.
template <bool has_scales>
KVASS_INLINE Floats score(const Tile& tile, int64_t strips, Seen seen, float soft_cap, float* products) {
  const bool masked = seen.low > 0 || seen.high < strips * kLanes;
  const Ints low = splat_int(static_cast<int32_t>(seen.low));
  const Ints high = splat_int(static_cast<int32_t>(seen.high));
  Floats most = splat(kNothing);
  KVASS_UNROLL for (int i = 0; i < kStrips; i++) {
    if (i >= strips) break;
    Floats found = load(products + i * kLanes);
    if constexpr (has_scales) found = found * load(tile.key_scales + i * kLanes);
    if (soft_cap != 0) found = splat(soft_cap) * tanh_of(found / splat(soft_cap));
    if (masked) {
      const Ints position = count_from(i * kLanes);
      found = select(position < low, splat(kMasked), found);
      found = select(position < high, found, splat(kMasked));
    }
    store(products + i * kLanes, found);
    most = greater(found, most);
  }
  return most;
}

// Turns products of `count` query heads, from `first` on, with the tile's keys into weights for values
// of so many strips, and says in `kept` what outputs so far are to be multiplied by. One step after
// the other for all of them: of one alone, each step would wait for the one before.
template <bool has_scales>
KVASS_INLINE void weigh(const Tile& tile, int64_t strips, int64_t first, int64_t count,
                        const Seen* seen, float soft_cap, float* products, Sums* sums, float* kept,
                        Unit* weights) {
  Floats most[kRoundRows];
  for (int64_t i = 0; i < count; i++)
    most[i] = score<has_scales>(tile, strips, seen[i], soft_cap, products + i * kTile);
  raise(most, count, sums->greatest + first, kept);
  for (int64_t i = 0; i < count; i++) {
    Floats* lanes = sums->lanes + first + i;
    *lanes = weights_of<has_scales>(products + i * kTile, strips, sums->greatest[first + i],
                                    tile.values_by, *lanes * splat(kept[i]),
                                    weights + i * kTile / kUnit);
  }
}

}  // namespace
