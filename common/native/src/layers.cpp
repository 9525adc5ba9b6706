// A model's layers one after the other, in one call: what common/model/llama.py does with calls of
// its own, by the same functions, so to the same bits.
//
// With one row a layer is eight pieces of work of ten to a hundred microseconds, and calling each from
// the interpreter costs some ten; the other threads have begun to sleep when the next piece comes.
//
// It is compiled for the level of products.cpp only.

#include "calls.h"

#if defined(__AVX512BF16__)

namespace {

// As in common/kernels/packed_layers.py, which has these three structures too.
struct Weight {
  const uint8_t* panels;
  const float* bias;
  int64_t outputs, inputs, format;
};

struct Layer {
  Weight qkv[3];  // q‖k‖v, and two without outputs; or where they are kept in several ways q, k and v
  Weight output, gate_up, down;
  const uint16_t* mlp_norm;
  const uint16_t* next_norm;  // of the layer after this one, before its attention
};

struct Run {
  const Layer* layers;
  int64_t layer_count, kv_size;  // numbers of a row's keys
  const Pool* pool;
  const Step* step;
  Turn turn;
  const int64_t* slots;
  const int64_t* offsets;
  float* rows;       // what runs through the layers, [count, hidden]: added to
  uint16_t* normed;  // these rows as the first layer wants them; then as the layer after the last
  int64_t count;
  double epsilon;
  int64_t threads;
  unsigned char* room;  // of kvass_layers_room bytes
};

// What a layer has of its rows on the way.
struct Room {
  uint16_t *qkv, *heads, *output, *gate_up, *gated;
  float* attended;
};

int64_t aligned(int64_t size) { return (size + 63) / 64 * 64; }

// Cuts the room; returns its size.
int64_t cut(const Layer& layer, int64_t count, unsigned char* room, Room* into) {
  int64_t size = 0;
  const auto taken = [&](int64_t width, int64_t bytes) {
    const int64_t at = size;
    size += aligned(count * width * bytes);
    return room + at;
  };
  const auto halves = [&](int64_t width) { return reinterpret_cast<uint16_t*>(taken(width, 2)); };
  into->qkv = halves(layer.qkv[0].outputs + layer.qkv[1].outputs + layer.qkv[2].outputs);
  into->attended = reinterpret_cast<float*>(taken(layer.output.inputs, 4));
  into->heads = halves(layer.output.inputs);
  into->output = halves(layer.output.outputs);
  into->gate_up = halves(layer.gate_up.outputs);
  into->gated = halves(layer.down.inputs);
  return size;
}

void multiply(const Run& run, const Weight& weight, const uint16_t* rows, uint16_t* out) {
  KVASS_AT(kvass_multiply)(static_cast<int>(run.threads), rows, run.count, weight.inputs,
                           static_cast<int>(weight.format), weight.panels, weight.outputs,
                           weight.bias, out, 1);
}

void norm(const Run& run, const Layer& layer, const uint16_t* addend, const uint16_t* weight) {
  KVASS_AT(kvass_norm)(static_cast<int>(run.threads), run.rows, addend, weight,
                       static_cast<float>(run.epsilon), run.normed, run.count,
                       layer.output.outputs);
}

// Computes q, k and v, side by side in a row or each in rows of its own.
void project(const Run& run, const Layer& layer, uint16_t* room, Rows* q, Rows* k, Rows* v) {
  const int64_t q_size = layer.output.inputs, width = layer.qkv[0].outputs;
  const bool is_one = layer.qkv[1].outputs == 0;
  const int64_t rows = is_one ? 1 : run.count;
  *q = {room, width, 1};
  *k = {room + rows * q_size, is_one ? width : run.kv_size, 1};
  *v = {room + rows * (q_size + run.kv_size), is_one ? width : run.kv_size, 1};
  multiply(run, layer.qkv[0], run.normed, room);
  if (is_one) return;
  multiply(run, layer.qkv[1], run.normed, room + rows * q_size);
  multiply(run, layer.qkv[2], run.normed, room + rows * (q_size + run.kv_size));
}

void run_layer(const Run& run, int64_t index, const Room& room) {
  const Layer& layer = run.layers[index];
  const int threads = static_cast<int>(run.threads);
  const int64_t q_size = layer.output.inputs;
  Rows q, k, v;
  project(run, layer, room.qkv, &q, &k, &v);
  KVASS_AT(kvass_append)(run.pool, index, run.count, &k, &v, &run.turn, run.slots, run.offsets,
                         run.threads);
  KVASS_AT(kvass_attend)(run.pool, run.step, index, &q, &run.turn, room.attended);
  KVASS_AT(kvass_narrow)(threads, room.attended, room.heads, run.count * q_size);
  multiply(run, layer.output, room.heads, room.output);
  norm(run, layer, room.output, layer.mlp_norm);
  multiply(run, layer.gate_up, run.normed, room.gate_up);
  KVASS_AT(kvass_gate)(threads, room.gate_up, room.gated, run.count, layer.down.inputs);
  multiply(run, layer.down, room.gated, room.output);
  norm(run, layer, room.output, layer.next_norm);
}

}  // namespace

// How many bytes of room so many rows need. All layers have the same widths.
KVASS_PUBLIC int64_t KVASS_AT(kvass_layers_room)(const Layer* layer, int64_t count) {
  Room room;
  return cut(*layer, count, nullptr, &room);
}

// Computes the layers from 0 on.
KVASS_PUBLIC void KVASS_AT(kvass_layers)(const Run* run) {
  Room room;
  cut(*run->layers, run->count, run->room, &room);
  for (int64_t index = 0; index < run->layer_count; index++) run_layer(*run, index, room);
}

// Writes the sizes of the structures that callers fill in: of Weight, Layer and Run.
KVASS_PUBLIC void KVASS_AT(kvass_layers_sizes)(int64_t* sizes) {
  sizes[0] = sizeof(Weight);
  sizes[1] = sizeof(Layer);
  sizes[2] = sizeof(Run);
}

#endif
