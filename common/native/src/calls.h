// What layers.cpp calls of the other sources, and what they define: one that changes its form alone does
// not compile.

#pragma once

#include "heads.h"

namespace {

struct Pool;  // pool.h
struct Step;  // attention.cpp

}  // namespace

KVASS_PUBLIC void KVASS_AT(kvass_append)(const Pool* pool, int64_t layer, int64_t count,
                                         const Rows* k, const Rows* v, const Turn* turn,
                                         const int64_t* slots, const int64_t* offsets,
                                         int64_t threads);
KVASS_PUBLIC void KVASS_AT(kvass_attend)(const Pool* pool, const Step* step, int64_t layer,
                                         const Rows* queries, const Turn* turn, float* out);
KVASS_PUBLIC void KVASS_AT(kvass_multiply)(int threads, const uint16_t* rows, int64_t count,
                                           int64_t inputs, int format, const uint8_t* weight,
                                           int64_t outputs, const float* bias, void* out,
                                           int rounded);
KVASS_PUBLIC void KVASS_AT(kvass_norm)(int threads, float* rows, const uint16_t* addend,
                                       const uint16_t* weight, float epsilon, uint16_t* out,
                                       int64_t count, int64_t width);
KVASS_PUBLIC void KVASS_AT(kvass_gate)(int threads, const uint16_t* gate_up, uint16_t* out,
                                       int64_t count, int64_t width);
KVASS_PUBLIC void KVASS_AT(kvass_narrow)(int threads, const float* from, uint16_t* out,
                                         int64_t count);
