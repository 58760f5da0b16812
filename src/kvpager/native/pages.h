// Tokens into frames and back; the binding has checked every size and index.
#pragma once

#include <cstdint>

#include "attention.h"

namespace kvpager {

struct TokenArgs {
  FrameView view;
  const int64_t* frames;
  const int64_t* slots;  // staging slots of these pages, or -1; null unless int8
  int64_t pages;
  int64_t offset, tokens;
  float* keys;  // [n][tokens][D]
  float* values;
};

struct PagesTable {
  void (*write)(const TokenArgs&);  // from keys and values; int8: pages with a slot into that, and those that fill both
  void (*read)(const TokenArgs&);   // whole pages (offset 0, tokens P); int8: pages with a slot from that
  void (*copy)(const FrameView&, const int64_t* from, const int64_t* to, int64_t pages);
  void (*load)(const FrameView&, const int64_t* frames, const uint8_t* bytes, int64_t pages);
  void (*dump)(const FrameView&, const int64_t* frames, uint8_t* bytes, int64_t pages);
  // rows of numbers (a multiple of 8), float32, float16 or bfloat16, from and to float32; and whether all are in -most..most (no NaN)
  void (*widen)(DType, const void* from, float* to, int64_t count);
  void (*narrow)(DType, const float* from, void* to, int64_t count);
  bool (*within)(DType, const void* row, int64_t count, float most);
};

}  // namespace kvpager
