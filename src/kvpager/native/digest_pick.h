// From each query's share of every page to the pages that are chosen, for digest.cpp alone: the rules of
// kvpager.core.selection.
#pragma once

#include "digest.h"
#include "digest_dot.h"

namespace kvpager::KV_ISA {
namespace {

// How many candidates are `least` or more.
inline int64_t reaching(const uint32_t* candidates, int64_t padded, uint32_t least) {
  i32x16 count{};
  for (int64_t i = 0; i < padded; i += 16) count -= (i32x16)(load<u32x16>(candidates + i) >= least);
  return total(count);
}

// The largest number that at least `least` of the candidates reach. Numbers of zero and above are in order as bits.
inline uint32_t threshold_of(const uint32_t* candidates, int64_t padded, int64_t least) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1)
    if (reaching(candidates, padded, found | bit) >= least) found |= bit;
  return found;
}

// wanted, mass: float [H][padded], of the pages, zeros beyond the last; both are overwritten. `candidates` has room for
// H * padded numbers, `marks` for `padded` bytes.
inline void pick(DigestChoice& c, float* wanted, float* mass, int64_t padded, uint32_t* candidates, uint8_t* marks,
                 int64_t looks) {
  typedef uint8_t u8x16 __attribute__((vector_size(16)));
  const int64_t heads = c.shape.heads, n = c.pages;
  const int64_t first = c.sinks < n ? c.sinks : n;
  const int64_t last = n - c.recent > first ? n - c.recent : first;
  const int64_t spare = last - first, all = spare * heads, end = (all + 15) / 16 * 16;
  int64_t left = (c.room - (n - spare)) * heads;
  left = left < all ? left : all;
  float threshold = __builtin_inff(), least = 0;
  uint32_t bits = 0;
  int64_t excess = 0;  // of those that just reach the threshold, how many are left out
  if (left > 0) {
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(candidates + h * spare, wanted + h * padded + first, sizeof(float) * static_cast<size_t>(spare));
    for (int64_t i = all; i < end; ++i) candidates[i] = 0;
    bits = threshold_of(candidates, end, left);
    std::memcpy(&threshold, &bits, 4);
    least = threshold;
    excess = (bits ? reaching(candidates, end, bits) : all) - left;
  }
  least = least > 1e-12f ? least : 1e-12f;  // mass below it is rounding noise
  f32x16 missed{};
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < first; ++i) mass[h * padded + i] = 0;  // protected: not missed
    for (int64_t i = last; i < n; ++i) mass[h * padded + i] = 0;
    for (int64_t i = 0; i < padded; i += 16) {
      const f32x16 want = load<f32x16>(wanted + h * padded + i), ratio = want / least;
      const i32x16 in = (i32x16)(want >= threshold);
      missed += in ? f32x16{} : load<f32x16>(mass + h * padded + i);
      store(wanted + h * padded + i, in ? max(ratio, splat(1)) : ratio);
      store(marks + i, __builtin_convertvector(in & 1, u8x16));
    }
    uint8_t* chosen = c.chosen + h * n;
    float* ratio = c.ratio + h * n;
    std::memcpy(chosen, marks, static_cast<size_t>(n));
    std::memcpy(ratio, wanted + h * padded, sizeof(float) * static_cast<size_t>(n));
    for (int64_t i = 0; i < first + n - last; ++i) {
      const int64_t kept = i < first ? i : last + i - first;
      chosen[kept] = 1;
      ratio[kept] = ratio[kept] > 1 ? ratio[kept] : 1;
    }
  }
  float ties = 0;  // between equals the earlier block wins, then the lower head
  for (int64_t i = last - 1; excess > 0 && i >= first; --i)
    for (int64_t h = heads - 1; excess > 0 && h >= 0; --h)
      if (candidates[h * spare + i - first] == bits) {
        c.chosen[h * n + i] = 0;
        c.ratio[h * n + i] = threshold / least;
        ties += mass[h * padded + i];
        --excess;
      }
  for (int lane = 0; lane < 16; ++lane) ties += missed[lane];
  c.missed = ties / static_cast<float>(heads * looks);
}

}  // namespace
}  // namespace kvpager::KV_ISA
