// What a product takes of two rows at once: a number, or a pair of bf16 numbers where the machine
// multiplies those with twice the speed.
//
// Both headers give the same names: `Unit` and what is done with it, how stored numbers become units,
// and how scores become weights.

#pragma once

#include "codes.h"

namespace {

constexpr int kTile = 64, kStrips = kTile / kLanes;  // positions, at absolute multiples

}  // namespace

#if defined(__AVX512BF16__)
#include "pairs.h"
#else
#include "singles.h"
#endif
