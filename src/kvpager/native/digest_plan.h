// What one choice keeps while it is made, and the queries that look, for digest.cpp alone.
#pragma once

#include "digest.h"
#include "digest_dot.h"

namespace kvpager::KV_ISA {
namespace {

constexpr int kPages = 16;         // a chunk: pages that are looked at together, one a lane
constexpr float kLowest = -1e30f;  // stands in for a peak of -inf, so that -inf - peak stays -inf
constexpr float kLog2E = 1.44269504088896341f;

// What one choice keeps for itself. Scores are logarithms to base 2; shapes use H (KV heads), R (looks of a head),
// W (R in whole vectors) and C (chunks).
struct Plan {
  int64_t looks, wide, chunks;
  int32_t* small;    // [H][R][D/4][kWeights]: queries in 8 bits, for the keys' steps
  int32_t* fine;     // [H][R][D/4][2]: in 16 bits, for the offsets; pairs of channels 0 and 2, then 1 and 3
  float* small_scale;  // [H][W]
  float* fine_scale;   // [H][W]
  float* own;        // [H][W]: log-sum-exp of the tile's own keys
  int64_t* first;    // [H][W]: first position that each look sees
  float* peaks;      // [H][C][W]: each look's largest score, then what its sums are to be multiplied with
  float* sums;       // [H][C][R][16]: sums of exponentials relative to the peak, a page each
  float* wanted;     // [H][C][16]
  float* mass;       // [H][C][16]
  uint32_t* candidates;  // [H * C * 16]
  uint8_t* marks;    // [C * 16]
  size_t bytes;

  Plan(const DigestShape& shape, int64_t pages, int64_t looks_of_head, void* scratch) : looks(looks_of_head) {
    wide = (looks + 15) / 16 * 16;
    chunks = (pages + kPages - 1) / kPages;
    char* at = static_cast<char*>(scratch);
    bytes = 0;
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<__typeof__(&*array)>(at + bytes);
      bytes += (static_cast<size_t>(count) * sizeof(*array) + 63) / 64 * 64;
    };
    const int64_t heads = shape.heads, groups = shape.head_dim / 4;
    take(small, heads * looks * groups * kWeights);
    take(fine, heads * looks * groups * 2);
    take(small_scale, heads * wide);
    take(fine_scale, heads * wide);
    take(own, heads * wide);
    take(first, heads * wide);
    take(peaks, heads * chunks * wide);
    take(sums, heads * chunks * looks * kPages);
    take(wanted, heads * chunks * kPages);
    take(mass, heads * chunks * kPages);
    take(candidates, heads * chunks * kPages);
    take(marks, chunks * kPages);
  }
};

// To whole numbers, ties to even; |x| below 2^22.
KV_INLINE Lanes<8>::i32 rounded(f32x8 x) {
  const f32x8 magic = f32x8{} + 12582912.0f;
  return (Lanes<8>::i32)(x + magic) - (Lanes<8>::i32)magic;
}

inline void prepare_query(const float* query, int head_dim, int32_t* small, int32_t* fine, float* small_scale,
                   float* fine_scale) {
  typedef int16_t i16x8 __attribute__((vector_size(16)));
  f32x8 most{};
  for (int d = 0; d < head_dim; d += 8) {
    const f32x8 x = load<f32x8>(query + d), size = x < 0 ? -x : x;
    most = size > most ? size : most;
  }
  float largest = 1e-30f;
  for (int lane = 0; lane < 8; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  *small_scale = largest / 127;
  *fine_scale = largest / 32767;
  const f32x8 to_small = f32x8{} + 127 / largest, to_fine = f32x8{} + 32767 / largest;
  for (int d = 0; d < head_dim; d += 8) {
    const f32x8 x = load<f32x8>(query + d);
    const i16x8 exact = __builtin_convertvector(rounded(x * to_fine), i16x8);
    store(fine + d / 2, __builtin_shufflevector(exact, exact, 0, 2, 1, 3, 4, 6, 5, 7));
#if KV_VNNI
    typedef int8_t i8x8 __attribute__((vector_size(8)));
    store(small + d / 4, __builtin_convertvector(rounded(x * to_small), i8x8));
#else
    const i16x8 rough = __builtin_convertvector(rounded(x * to_small), i16x8);
    store(small + d / 2, __builtin_shufflevector(rough, rough, 0, 2, 1, 3, 4, 6, 5, 7));
#endif
  }
}

// All looks of one KV head, by query head, then by position.
inline void prepare(const DigestChoice& c, const Plan& plan, int head) {
  const int dim = c.shape.head_dim, groups = dim / 4;
  const Looks looks{c.tokens, c.sample, c.group};
  int64_t row = head * plan.wide, at = head * plan.looks;
  for (int g = 0; g < c.group; ++g) {
    const int64_t query_head = head * c.group + g, count = looks.count(g);
    for (int64_t i = 0; i < count; ++i, ++row, ++at) {
      const int64_t token = c.tokens - 1 - looks.back(g) - (count - 1 - i) * c.sample;
      const float* query = c.queries + query_head * c.head_stride + token * c.token_stride;
      prepare_query(query, dim, plan.small + at * groups * kWeights, plan.fine + at * groups * 2,
                    plan.small_scale + row, plan.fine_scale + row);
      plan.small_scale[row] *= 3 * c.scale * kLog2E;  // a table holds steps of code 3
      plan.fine_scale[row] *= c.scale * kLog2E;
      plan.own[row] = c.own_lse[query_head * c.tokens + token] * kLog2E;
      plan.first[row] = c.window ? c.start + token - c.window + 1 : 0;
    }
  }
}

}  // namespace
}  // namespace kvpager::KV_ISA
