// The small operations between a model's products, each one pass over its rows.
//
// Arithmetic is in float32, sixteen values at a time; sums over a row go into sixteen lanes and are
// folded in one fixed order, and a row is one thread's alone: its bits depend on nothing else. Values
// beyond a row's last whole vector are computed as vectors are, so that none has other bits for its
// place.

#include <cstring>

#include "calls.h"
#include "level.h"
#include "threads.h"

namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int64_t kLanes = 16;
constexpr int64_t kPartValues = 32768;  // a thread's piece of rows: some 10 microseconds

// Vectors are passed by reference and returned through one: how a function takes them by value
// differs from level to level.
template <typename Vector, typename Value>
__attribute__((always_inline)) inline void take(Vector& into, const Value* from, int64_t count) {
  if (count == kLanes) {
    memcpy(&into, from, sizeof into);
    return;
  }
  into = Vector{};
  memcpy(&into, from, count * sizeof(Value));
}

template <typename Vector, typename Value>
__attribute__((always_inline)) inline void put(Value* into, const Vector& from, int64_t count) {
  memcpy(into, &from, count == kLanes ? sizeof from : count * sizeof(Value));
}

__attribute__((always_inline)) inline void widen(Floats& into, const Halves& from) {
  const Words words = __builtin_convertvector(from, Words) << 16;
  memcpy(&into, &words, sizeof into);
}

// Rounds to the nearest bf16, ties to even; what is not a number stays so.
__attribute__((always_inline)) inline void narrow(Halves& into, const Floats& from) {
  Words words;
  memcpy(&words, &from, sizeof words);
  const Words nearest = words + 0x7fff + ((words >> 16) & 1);
  const Words kept = from == from ? nearest : words | 0x400000;
  into = __builtin_convertvector(kept >> 16, Halves);
}

// e to the power of each value, by the nearest power of two and a polynomial of what is left
// (Cephes' expf); relative error below 2e-7. Infinite from 88.4 on; below -87 it stops falling.
__attribute__((always_inline)) inline void exponential(Floats& value) {
  const Floats most = Floats{} + 89.0f, least = Floats{} - 87.0f;
  value = value > most ? most : value;
  value = value < least ? least : value;
  const float magic = 12582912.0f;  // added and taken away again it rounds to whole numbers
  const Floats shifted = value * 1.44269504088896341f + magic;
  const Floats whole = shifted - magic;
  Floats rest = value - whole * 0.693359375f;
  rest = rest - whole * -2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  Floats scale;
  memcpy(&scale, &power, sizeof scale);
  value = sum * scale;
}

int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

struct Norm {
  float* rows;
  const uint16_t* addend;  // or null
  const uint16_t* weight;
  uint16_t* out;
  int64_t count, width, part_rows;
  float epsilon;
};

// Adds the addend to a row, where there is one, and returns the row's sum of squares.
float sum_squares(const Norm& n, int64_t row) {
  float* values = n.rows + row * n.width;
  const uint16_t* addend = n.addend == nullptr ? nullptr : n.addend + row * n.width;
  Floats lanes{};
  for (int64_t i = 0; i < n.width; i += kLanes) {
    const int64_t count = least(kLanes, n.width - i);
    Floats value;
    take(value, values + i, count);
    if (addend != nullptr) {
      Halves half;
      Floats more;
      take(half, addend + i, count);
      widen(more, half);
      value += more;
      put(values + i, value, count);
    }
    lanes += value * value;
  }
  float sums[kLanes];
  memcpy(sums, &lanes, sizeof sums);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
}

void norm_part(void* given, int64_t part) {
  const Norm& n = *static_cast<const Norm*>(given);
  const int64_t first = part * n.part_rows, stop = least(first + n.part_rows, n.count);
  for (int64_t row = first; row < stop; row++) {
    const float mean = sum_squares(n, row) / static_cast<float>(n.width);
    const float scale = 1.0f / __builtin_sqrtf(mean + n.epsilon);
    for (int64_t i = 0; i < n.width; i += kLanes) {
      const int64_t count = least(kLanes, n.width - i);
      Floats value, factor;
      Halves half;
      take(value, n.rows + row * n.width + i, count);
      take(half, n.weight + i, count);
      widen(factor, half);
      narrow(half, value * scale * factor);
      put(n.out + row * n.width + i, half, count);
    }
  }
}

struct Gate {
  const uint16_t* gate_up;
  uint16_t* out;
  int64_t count, width, part_rows;
};

void gate_part(void* given, int64_t part) {
  const Gate& g = *static_cast<const Gate*>(given);
  const int64_t first = part * g.part_rows, stop = least(first + g.part_rows, g.count);
  for (int64_t row = first; row < stop; row++) {
    const uint16_t* from = g.gate_up + 2 * row * g.width;
    for (int64_t i = 0; i < g.width; i += kLanes) {
      const int64_t count = least(kLanes, g.width - i);
      Halves half;
      Floats gate, up;
      take(half, from + i, count);
      widen(gate, half);
      take(half, from + g.width + i, count);
      widen(up, half);
      Floats power = -gate;
      exponential(power);
      narrow(half, gate / (1.0f + power) * up);
      put(g.out + row * g.width + i, half, count);
    }
  }
}

struct Narrowing {
  const float* from;
  uint16_t* out;
  int64_t count;
};

void narrow_part(void* given, int64_t part) {
  const Narrowing& n = *static_cast<const Narrowing*>(given);
  const int64_t stop = least((part + 1) * kPartValues, n.count);
  for (int64_t i = part * kPartValues; i < stop; i += kLanes) {
    const int64_t count = least(kLanes, stop - i);
    Floats value;
    Halves half;
    take(value, n.from + i, count);
    narrow(half, value);
    put(n.out + i, half, count);
  }
}

int64_t rows_of_a_part(int64_t width) { return width > kPartValues ? 1 : kPartValues / width; }

}  // namespace

// Adds bf16 `addend` [count, width], unless null, to float32 `rows`, in place; writes into bf16 `out`
// the rows scaled to a mean square of one and by bf16 `weight` [width].
KVASS_PUBLIC void KVASS_AT(kvass_norm)(int threads, float* rows, const uint16_t* addend,
                                       const uint16_t* weight, float epsilon, uint16_t* out,
                                       int64_t count, int64_t width) {
  Norm n{rows, addend, weight, out, count, width, rows_of_a_part(width), epsilon};
  kvass::parallel(threads, (count + n.part_rows - 1) / n.part_rows, norm_part, &n);
}

// Writes silu(gate) times up of bf16 `gate_up` [count, gate then up, width] into bf16 `out`.
KVASS_PUBLIC void KVASS_AT(kvass_gate)(int threads, const uint16_t* gate_up, uint16_t* out,
                                       int64_t count, int64_t width) {
  Gate g{gate_up, out, count, width, rows_of_a_part(width)};
  kvass::parallel(threads, (count + g.part_rows - 1) / g.part_rows, gate_part, &g);
}

// Writes float32 `from` [count] into bf16 `out`, rounded.
KVASS_PUBLIC void KVASS_AT(kvass_narrow)(int threads, const float* from, uint16_t* out,
                                         int64_t count) {
  Narrowing n{from, out, count};
  kvass::parallel(threads, (count + kPartValues - 1) / kPartValues, narrow_part, &n);
}
