// Attention of one tile of queries over one group of pages; the binding has checked every size and index.
#pragma once

#include <cstdint>

#include "layout.h"

namespace kvpager {

constexpr int64_t kStagingSlab = 64;

// The frames, and (int8) the slots in which pages that are not full are held: float32 keys [P][D], then values [P][D].
struct FrameView {
  Layout layout;
  uint8_t* frames;
  const int32_t* staged;  // [frames] slot of a frame, or -1; null unless int8
  float* const* staging;  // slabs of kStagingSlab slots each

  float* slot(int64_t index) const {
    return staging[index / kStagingSlab] + index % kStagingSlab * 2 * layout.page_size * layout.head_dim;
  }
};

struct AttendArgs {
  FrameView view;
  // the pages, sorted by head
  const int64_t* frames;
  const int64_t* heads;
  const int64_t* starts;
  const int64_t* counts;
  int64_t pages;
  int64_t after;                    // frames that lie behind those in `frames`, wanted soon by the same thread
  int64_t kv_heads, group, tokens;  // H, G, T
  const float* queries;             // [H * G][T][D]
  int64_t start;                    // position of the first query
  int64_t window;                   // 0 for none
  float scale;
  float softcap;    // 0 for none
  float* output;    // [H * G][T][D]
  float* lse;       // [H * G][T]
  float* page_lse;  // [n][G][T], where T is 1 [G][n]; or null
};

struct SettlePart {
  const float* output;    // [H * G][T][D]
  const float* lse;       // [H * G][T]
  const float* page_lse;  // as AttendArgs have it; n of this part
  int64_t pages;
};

struct SettleArgs {
  const SettlePart* parts;
  int64_t count;
  const int64_t* heads;  // [n of all parts]
  int64_t kv_heads, group, tokens, dim;
  float* output;  // [H * G][T][D], or null where there is one part, whose output it is
  float* masses;  // [4][n]: peak, total, last, window
  int64_t pages;  // n of all parts
};

struct AttentionTable {
  bool (*attend)(const AttendArgs&);  // false: no memory for scratch
  bool (*settle)(const SettleArgs&);
};

}  // namespace kvpager
