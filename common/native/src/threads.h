// Sharing one piece of work among threads that wait for it.

#pragma once

#include <cstdint>

namespace kvass {

// Runs body(context, part) for each part in [0, parts), on up to `threads` threads, the caller among
// them; returns when all have ended. Which thread runs which part is not said. While another caller
// shares work the caller does its own alone: it never waits for it.
void parallel(int threads, int64_t parts, void (*body)(void*, int64_t), void* context);

}  // namespace kvass
