// A plain read of memory as fast as the cores reach: the yardstick of `kvpager bench`.
#pragma once

#include <cstdint>

#include "isa.h"

namespace kvpager {

struct StreamTable {
  // Reads all of `bytes` and returns a value that depends on every one of them.
  uint64_t (*read)(const uint8_t* data, int64_t bytes);
};

KV_DECLARE_TABLE(StreamTable, stream)

// What one thread takes at a time: two streams of one huge page each.
constexpr int64_t kStreamPiece = int64_t{4} << 20;

}  // namespace kvpager
