// Vectors of 16 numbers as the registers hold them, for the innermost loops. For kernel sources alone, like vec.h.
#pragma once

#include "vec.h"

namespace kvpager::KV_ISA {

// As wide as a register. Sums are arrays of these: what is wider than a register, GCC keeps in memory, and there moves
// it in pieces that can't be forwarded to the next load.
#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX2__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
constexpr int kParts = 16 / kWide;
typedef float FloatPart __attribute__((vector_size(4 * kWide)));
typedef uint32_t BitsPart __attribute__((vector_size(4 * kWide)));
typedef int32_t WholePart __attribute__((vector_size(4 * kWide)));
typedef uint16_t HalfPart __attribute__((vector_size(2 * kWide)));

template <class V>
struct Parts {
  V part[kParts];
};
using Sums = Parts<FloatPart>;

KV_INLINE Sums load_sums(const float* from) {
  Sums s;
  for (int p = 0; p < kParts; ++p) s.part[p] = load<FloatPart>(from + p * kWide);
  return s;
}
KV_INLINE void store_sums(float* to, const Sums& s) {
  for (int p = 0; p < kParts; ++p) store(to + p * kWide, s.part[p]);
}
KV_INLINE void add(Sums& s, const Sums& other) {
  for (int p = 0; p < kParts; ++p) s.part[p] += other.part[p];
}
KV_INLINE void scale(Sums& s, float by) {
  for (int p = 0; p < kParts; ++p) s.part[p] *= by;
}
// contracted by the compiler where it can
KV_INLINE void add_product(Sums& s, const Sums& x, float m) {
  for (int p = 0; p < kParts; ++p) s.part[p] = x.part[p] * m + s.part[p];
}

template <class V>
KV_INLINE Parts<V> read_parts(const uint8_t* at) {
  Parts<V> x;
  for (int p = 0; p < kParts; ++p) x.part[p] = load<V>(at + p * static_cast<int64_t>(sizeof(V)));
  return x;
}
template <class V>
KV_INLINE Parts<V> read_parts(const uint8_t* low, const uint8_t* high) {
  constexpr int64_t kHalf = sizeof(V) * kParts / 2;
  Parts<V> x = {};
  if constexpr (kParts == 1) {
    uint8_t both[sizeof(V)] = {};
    std::memcpy(both, low, kHalf);
    if (high) std::memcpy(both + kHalf, high, kHalf);
    x.part[0] = load<V>(both);
  } else {
    for (int p = 0; p < kParts / 2; ++p) {
      const int64_t at = p * static_cast<int64_t>(sizeof(V));
      x.part[p] = load<V>(low + at);
      if (high) x.part[p + kParts / 2] = load<V>(high + at);
    }
  }
  return x;
}

}  // namespace kvpager::KV_ISA
