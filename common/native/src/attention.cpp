// Attention over a paged pool, for decoding and for prefill by the same arithmetic.
//
// A step's rows are cut into groups: rows of one table, one after the other in the step, that read
// each key tile once for all of them. Positions are cut into splits at absolute multiples; a split's
// tiles are summed in their order, and splits are joined in theirs (`join`), whether one thread
// computes all of them or each is computed by itself. So a row's bits depend on its query, its
// position and what is stored before it, and on nothing else. What a group computes beyond a row's own
// positions weighs exactly nothing.

#include "calls.h"
#include "threads.h"
#include "tile.h"

namespace {

constexpr int64_t kSplit = 1024;        // positions; a multiple of kTile
constexpr int64_t kNumbersMax = 24576;  // in a group's queries
constexpr int64_t kSharesAThread = 4;   // a group is cut into splits when it is more than such a share

// Rows [row, row + rows) of the step, which attend to positions within [first, limit). `partials`:
// where its results by split begin, in floats; below 0 where all of its splits are one share.
struct Group {
  int64_t row, rows, first, limit, partials;
};

// What one thread computes at a time, for each KV head: a split of a group, or all (below 0).
struct Share {
  int64_t group, split;
};

struct Step {
  const int64_t* tables;
  int64_t table_width;
  const int64_t* row_table;
  const int64_t* row_position;
  int64_t rows, threads;
  Group* groups;  // room for as many as rows
  Share* shares;  // room for rows times splits
  int32_t* left;  // of each group and KV head: how many splits are to come
  float* partials;
  int64_t group_count, share_count, partial_count;
};

int64_t heads_a_head(const Pool& pool) { return pool.query_heads / pool.kv_heads; }

// --- the plan ---

int64_t group_rows(const Pool& pool) {
  const int64_t by_size = kNumbersMax / pool.head_dim;
  const int64_t queries = kQueriesMax < by_size ? kQueriesMax : by_size;
  const int64_t rows = queries / heads_a_head(pool);
  return rows > 1 ? rows : 1;
}

int64_t first_position(const Pool& pool, int64_t position) {
  return pool.window > 0 && position >= pool.window ? position - pool.window + 1 : 0;
}

void make_groups(const Pool& pool, Step* step) {
  const int64_t most = group_rows(pool);
  step->group_count = 0;
  for (int64_t row = 0; row < step->rows;) {
    Group group{row, 0, INT64_MAX, 0, -1};
    for (; row < step->rows && group.rows < most; row++, group.rows++) {
      if (step->row_table[row] != step->row_table[group.row]) break;
      const int64_t position = step->row_position[row], first = first_position(pool, position);
      if (first < group.first) group.first = first;
      if (position >= group.limit) group.limit = position + 1;
    }
    step->groups[step->group_count++] = group;
  }
}

int64_t first_split(const Group& group) { return group.first / kSplit; }
int64_t split_stop(const Group& group) { return (group.limit + kSplit - 1) / kSplit; }

// Floats of one split's results for one KV head.
int64_t partial_size(const Pool& pool, const Group& group) {
  const int64_t queries = group.rows * heads_a_head(pool);
  return (queries * (pool.head_dim + 2) + kLanes - 1) / kLanes * kLanes;
}

void make_shares(const Pool& pool, Step* step) {
  int64_t total = 0;
  for (int64_t i = 0; i < step->group_count; i++) {
    const Group& group = step->groups[i];
    total += group.rows * (group.limit - group.first);
  }
  step->share_count = step->partial_count = 0;
  // The last rows of a prompt have the longest contexts: they go first.
  for (int64_t i = step->group_count - 1; i >= 0; i--) {
    Group& group = step->groups[i];
    const int64_t work = group.rows * (group.limit - group.first);
    const int64_t splits = split_stop(group) - first_split(group);
    if (splits < 2 || step->threads < 2 ||
        work * step->threads * kSharesAThread <= total * pool.kv_heads) {
      step->shares[step->share_count++] = {i, -1};
      continue;
    }
    group.partials = step->partial_count;
    step->partial_count += splits * pool.kv_heads * partial_size(pool, group);
    for (int64_t split = first_split(group); split < split_stop(group); split++)
      step->shares[step->share_count++] = {i, split};
  }
}

// --- computing ---

struct Work {
  const Pool* pool;
  const Step* step;
  int64_t layer;
  Rows queries;
  const Turn* turn;
  float* out;
};

// A group's results for one KV head: of each query, the greatest score, the sum of weights, and the
// weighted sum of values.
struct Results {
  float* greatest;
  float* weight;
  float* output;
};

// One thread's room.
struct Room {
  Tile tile;
  alignas(64) Unit queries[kNumbersMax / kUnit];
  Seen seen[kQueriesMax];  // positions that a query sees
  alignas(64) float output[2][kNumbersMax];
  Sums sums;
  float greatest[2][kQueriesMax], weight[2][kQueriesMax];
};

Results results_of(Room* room, int which) {
  return {room->greatest[which], room->weight[which], room->output[which]};
}

Results partial_of(const Work& work, const Group& group, int64_t head, int64_t split) {
  const int64_t size = partial_size(*work.pool, group);
  const int64_t queries = group.rows * heads_a_head(*work.pool);
  float* at = work.step->partials + group.partials +
              ((split - first_split(group)) * work.pool->kv_heads + head) * size;
  const int64_t output = queries * work.pool->head_dim;
  return {at + output, at + output + queries, at};
}

// Reads a group's queries of a KV head and where they are: turned, rotated as K is, and scaled so that 2**score is what
// softmax wants.
void read_queries(const Work& work, const Group& group, int64_t head, Room* room) {
  const Pool& pool = *work.pool;
  const int64_t share = heads_a_head(pool), head_dim = pool.head_dim;
  const Floats factor =
      splat(static_cast<float>(1.4426950408889634 / __builtin_sqrt(static_cast<double>(head_dim))));
  alignas(64) float numbers[kHeadMax];
  for (int64_t query = 0; query < group.rows * share; query++) {
    const int64_t row = group.row + query / share, position = work.step->row_position[row];
    room->seen[query] = {first_position(pool, position), position + 1};
    read_head(work.queries, row, head * share + query % share, head_dim, work.turn, numbers);
    if (pool.key_rotated) rotate(numbers, head_dim, pool.rotation);
    for (int64_t i = 0; i < head_dim; i += kLanes) store(numbers + i, load(numbers + i) * factor);
    keep(numbers, head_dim, room->queries + query * head_dim / kUnit);
  }
}

// What some queries, at most kRoundRows, make of a tile. `asks` is above 0 where they ask memory for a
// part of the next one.
template <class Code, int asks>
void attend_round(const Work& work, Room* room, int64_t first, int64_t count,
                  float* output) {
  const Pool& pool = *work.pool;
  const Tile& tile = room->tile;
  const int64_t head_dim = pool.head_dim, depth = head_dim / kUnit;
  const Seen* positions = room->seen + first;
  Seen seen[kRoundRows];
  int64_t lowest = INT64_MAX, highest = 0;
  for (int64_t i = 0; i < count; i++) {
    seen[i] = {positions[i].low - tile.start, positions[i].high - tile.start};
    if (seen[i].low < lowest) lowest = seen[i].low;
    if (seen[i].high > highest) highest = seen[i].high;
  }
  if (highest <= 0 || lowest >= tile.count) return;
  const int64_t stop = highest < tile.count ? highest : tile.count;
  const int64_t strips = (stop + kLanes - 1) / kLanes;
  alignas(64) float products[kRoundRows * kTile];
  alignas(64) Unit weights[kRoundRows * kTile / kUnit];
  alignas(64) float kept[kRoundRows + kLanes];
  const float soft_cap = static_cast<float>(pool.soft_cap * 1.4426950408889634);
  multiply<false, asks>(count, room->queries + first * depth, depth, tile.keys, kTile, depth, strips,
                        nullptr, products, kTile, tile.ahead[0]);
  weigh<Code::kScaled>(tile, strips, first, count, seen, soft_cap, products, &room->sums, kept,
                       weights);
  multiply<true, asks>(count, weights, kTile / kUnit, tile.values, head_dim,
                       (stop + kUnit - 1) / kUnit, head_dim / kLanes, kept,
                       output + first * head_dim, head_dim, tile.ahead[1]);
}

template <class Code>
void attend_split(const Work& work, const Group& group, const Source& source, Room* room,
                  int64_t split, Results results) {
  const int64_t queries = group.rows * heads_a_head(*work.pool), head_dim = work.pool->head_dim;
  for (int64_t i = 0; i < queries; i++) {
    room->sums.lanes[i] = splat(0.0f);
    room->sums.greatest[i] = kNothing;
  }
  memset(results.output, 0, 4 * queries * head_dim);
  const int64_t begin = group.first / kTile * kTile, end = (split + 1) * kSplit;
  int64_t start = split * kSplit;
  if (start < begin) start = begin;
  for (; start < end && start < group.limit; start += kTile) {
    fill<Code>(source, start, &room->tile);
    for (int64_t first = 0; first < queries; first += kRoundRows) {
      const int64_t rest = queries - first, count = rest < kRoundRows ? rest : kRoundRows;
      auto* attend = first == 0 ? attend_round<Code, kAsks<Code>> : attend_round<Code, 0>;
      attend(work, room, first, count, results.output);
    }
  }
  for (int64_t i = 0; i < queries; i++) {
    results.greatest[i] = room->sums.greatest[i];
    results.weight[i] = total(room->sums.lanes[i]);
  }
}

// Adds the next split's results to those of the splits before.
void join(const Results& sum, const Results& next, int64_t queries, int64_t head_dim) {
  for (int64_t i = 0; i < queries; i++) {
    const float before = sum.greatest[i], now = next.greatest[i];
    const float after = now > before ? now : before;
    const Floats kept = splat(power_of_two(before - after));
    const Floats added = splat(power_of_two(now - after));
    sum.greatest[i] = after;
    const Floats weight = fused(splat(next.weight[i]), added, splat(sum.weight[i]) * kept);
    sum.weight[i] = weight.part[0][0];
    for (int64_t at = i * head_dim; at < (i + 1) * head_dim; at += kLanes)
      store(sum.output + at, fused(load(next.output + at), added, load(sum.output + at) * kept));
  }
}

// Divides by the sums of weights and writes to the step's output, unrotated.
void finish(const Work& work, const Group& group, int64_t head, const Results& results) {
  const Pool& pool = *work.pool;
  const int64_t share = heads_a_head(pool), head_dim = pool.head_dim;
  for (int64_t i = 0; i < group.rows * share; i++) {
    const int64_t row = group.row + i / share, query_head = head * share + i % share;
    float* out = work.out + (row * pool.query_heads + query_head) * head_dim;
    const Floats weight = splat(results.weight[i]);
    // Adding 0 makes -0 into 0: which of them a sum is may depend on what weighed nothing in it.
    for (int64_t at = 0; at < head_dim; at += kLanes)
      store(out + at, load(results.output + i * head_dim + at) / weight + splat(0.0f));
    if (pool.value_rotated) rotate(out, head_dim, pool.rotation);
  }
}

template <class Code>
void attend_share(void* context, int64_t part) {
  const Work& work = *static_cast<const Work*>(context);
  const Pool& pool = *work.pool;
  const Step& step = *work.step;
  const Share share = step.shares[part / pool.kv_heads];
  const int64_t head = part % pool.kv_heads;
  const Group& group = step.groups[share.group];
  const int64_t queries = group.rows * heads_a_head(pool);
  const Source source{&pool, step.tables + step.row_table[group.row] * step.table_width,
                      place_of(pool, work.layer, head), group.first, group.limit};
  Room room;
  read_queries(work, group, head, &room);
  const int64_t first = first_split(group), stop = split_stop(group);
  Results sum = results_of(&room, 0);
  if (share.split < 0) {
    attend_split<Code>(work, group, source, &room, first, sum);
    for (int64_t split = first + 1; split < stop; split++) {
      attend_split<Code>(work, group, source, &room, split, results_of(&room, 1));
      join(sum, results_of(&room, 1), queries, pool.head_dim);
    }
  } else {
    attend_split<Code>(work, group, source, &room, share.split,
                       partial_of(work, group, head, share.split));
    int32_t* left = step.left + share.group * pool.kv_heads + head;
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) > 0) return;
    sum = partial_of(work, group, head, first);
    for (int64_t split = first + 1; split < stop; split++)
      join(sum, partial_of(work, group, head, split), queries, pool.head_dim);
  }
  finish(work, group, head, sum);
}

}  // namespace

// How many positions a split has: what bounds the shares of a step.
KVASS_PUBLIC int64_t KVASS_AT(kvass_split)() { return kSplit; }

// Cuts a step into groups and shares, and says how many floats of `partials` it needs.
KVASS_PUBLIC void KVASS_AT(kvass_plan_attention)(const Pool* pool, Step* step) {
  make_groups(*pool, step);
  make_shares(*pool, step);
}

// Attends in one layer: out float32 [rows, query heads, head_dim]. `turn`: null where queries are
// turned by their positions already.
KVASS_PUBLIC void KVASS_AT(kvass_attend)(const Pool* pool, const Step* step, int64_t layer,
                                         const Rows* queries, const Turn* turn, float* out) {
  Work work{pool, step, layer, *queries, turn, out};
  for (int64_t i = 0; i < step->group_count; i++) {
    const Group& group = step->groups[i];
    const int64_t splits = split_stop(group) - first_split(group);
    for (int64_t head = 0; head < pool->kv_heads; head++)
      step->left[i * pool->kv_heads + head] = static_cast<int32_t>(splits);
  }
  auto* body = attend_share<Codes<kFp8>>;
  if (pool->format == kInt8) body = attend_share<Codes<kInt8>>;
  if (pool->format == kBf16) body = attend_share<Codes<kBf16>>;
  if (pool->format == kInt4) body = attend_share<Codes<kInt4>>;
  kvass::parallel(static_cast<int>(step->threads), step->share_count * pool->kv_heads, body, &work);
}

// Writes the sizes of the structures that callers fill in: of Pool, Step, Rows and Turn.
KVASS_PUBLIC void KVASS_AT(kvass_attention_sizes)(int64_t* sizes) {
  sizes[0] = sizeof(Pool);
  sizes[1] = sizeof(Step);
  sizes[2] = sizeof(Rows);
  sizes[3] = sizeof(Turn);
}
