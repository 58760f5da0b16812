// Reading ahead: weights that the next products will want, fetched by idle threads while Python runs in between.
#pragma once

#include <cstdint>

namespace kvpager {

struct Range {
  const uint8_t* from;
  int64_t bytes;
};

// Says that these ranges have just been read, one after the other. What came after them last time is expected again:
// a model's products run in the same order in every step. The pool's idle threads fetch it into the cache.
void read_in_order(const Range* ranges, int count);

}  // namespace kvpager
