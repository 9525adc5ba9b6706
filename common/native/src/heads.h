// Rows of heads as one function hands them to another: where they are, and how they are turned.

#pragma once

#include "level.h"

namespace {

// Rows of heads, float32 or bf16; `step` numbers from one row to the next.
struct Rows {
  const void* data;
  int64_t step;
  int64_t is_bf16;
};

// Cosine and sine [rows, head_dim / 2] of rows' positions; none where rows are turned already.
struct Turn {
  const float* cosine;
  const float* sine;
};

}  // namespace
