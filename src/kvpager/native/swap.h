// Pages between the frames and the slabs of swap, with a checksum a page; the binding has checked every index.
#pragma once

#include <cstdint>

namespace kvpager {

struct SwapArgs {
  const int64_t* slabs;   // addresses
  const int64_t* starts;  // first slot of each, ascending
  int64_t slab_count;
  int64_t page_bytes;
  const int64_t* slots;  // [n]
  uint8_t* memory;
  const int64_t* rows;  // [n], of the memory
  int64_t pages;        // n
  uint64_t* sums;       // [n], of what was copied
};

struct SwapTable {
  void (*copy)(const SwapArgs&, bool to_slots);
};

}  // namespace kvpager
