// From each query's share of every page to the pages that are chosen, for digest.cpp alone: the rules of
// kvpager.core.selection.
#pragma once

#include "digest.h"
#include "vec.h"

namespace kvpager::KV_ISA {
namespace {

// The largest number that at least `least` of the candidates reach. Numbers of zero and above are in order as bits.
inline uint32_t threshold_of(const uint32_t* candidates, int64_t padded, int64_t least) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
    const u32x16 tried = u32x16{} + (found | bit);
    i32x16 count{};
    for (int64_t i = 0; i < padded; i += 16) count -= load<u32x16>(candidates + i) >= tried;
    int64_t reached = 0;
    for (int lane = 0; lane < 16; ++lane) reached += count[lane];
    if (reached >= least) found |= bit;
  }
  return found;
}

// wanted, mass: float [H][padded], of the pages; `candidates` has room for H * padded numbers.
inline void pick(DigestChoice& c, const float* wanted, const float* mass, int64_t padded, uint32_t* candidates,
                 int64_t looks) {
  const int64_t heads = c.shape.heads, n = c.pages;
  const int64_t first = c.sinks < n ? c.sinks : n;
  const int64_t last = n - c.recent > first ? n - c.recent : first;
  const int64_t spare = last - first, all = spare * heads;
  int64_t left = (c.room - (n - spare)) * heads;
  left = left < all ? left : all;
  float threshold = 0;
  int64_t ties = all;  // how many of those that just reach the threshold are in
  if (left > 0) {
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(candidates + h * spare, wanted + h * padded + first, sizeof(float) * static_cast<size_t>(spare));
    const int64_t end = (all + 15) / 16 * 16;
    for (int64_t i = all; i < end; ++i) candidates[i] = 0;
    const uint32_t bits = threshold_of(candidates, end, left);
    std::memcpy(&threshold, &bits, 4);
    int64_t above = 0, equal = 0;
    for (int64_t i = 0; i < all; ++i) {
      above += candidates[i] > bits;
      equal += candidates[i] == bits;
    }
    ties = left - above < equal ? left - above : all;
  }
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < n; ++i)
      c.chosen[h * n + i] = left > 0 ? wanted[h * padded + i] >= threshold : i < first || i >= last;
  if (left > 0 && ties < all) {  // between equals the earlier block wins, then the lower head
    int64_t seen = 0;
    for (int64_t i = first; i < last; ++i)
      for (int64_t h = 0; h < heads; ++h)
        if (wanted[h * padded + i] == threshold && seen++ >= ties) c.chosen[h * n + i] = 0;
  }
  const float least = threshold > 1e-12f ? threshold : 1e-12f;  // mass below it is rounding noise
  float missed = 0;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < n; ++i) {
      const bool kept = i < first || i >= last;
      const bool in = kept || c.chosen[h * n + i];
      const float ratio = wanted[h * padded + i] / least;
      c.chosen[h * n + i] = in;
      c.ratio[h * n + i] = in && !(ratio > 1) ? 1 : ratio;
      missed += in ? 0 : mass[h * padded + i];
    }
  }
  c.missed = missed / static_cast<float>(heads * looks);
}

}  // namespace
}  // namespace kvpager::KV_ISA
