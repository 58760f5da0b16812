// The types that pages are stored in, as the blocks of attention_blocks.h see them: how 16 items (tokens of the keys,
// channels of the values), each of kPair stored numbers, are read and multiplied. For kernel sources alone.
//
//   M         a multiplier as it lies in memory; kMult of them belong to one item (a query's channels, or weights)
//   read      16 items at one place, or 8 at each of two (at no second one: zeros)
//   dot       sum + item . multiplier, for 16 items and one multiplier
//   pack      16 floats as multipliers
#pragma once

#include "attention_vec.h"
#include "parts.h"

namespace kvpager::KV_ISA {

struct Float32 {
  static constexpr int kPair = 1, kItem = 4, kMult = 1;
  using M = float;
  using Operand = Sums;
  static KV_INLINE Operand read(const uint8_t* at) { return read_parts<FloatPart>(at); }
  static KV_INLINE Operand read(const uint8_t* low, const uint8_t* high) { return read_parts<FloatPart>(low, high); }
  static KV_INLINE void dot(Sums& sum, const Operand& x, const M* m) { add_product(sum, x, *m); }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, x); }
};

struct Float16 {
  static constexpr int kPair = 1, kItem = 2, kMult = 1;
  using M = float;
  using Operand = Sums;
  static KV_INLINE Operand read(const uint8_t* at) { return widen(read_parts<HalfPart>(at)); }
  static KV_INLINE Operand read(const uint8_t* low, const uint8_t* high) {
    return widen(read_parts<HalfPart>(low, high));
  }
  static KV_INLINE Operand widen(const Parts<HalfPart>& raw) {
    Operand x;
    for (int p = 0; p < kParts; ++p) x.part[p] = widen_f16<FloatPart, BitsPart>(raw.part[p]);
    return x;
  }
  static KV_INLINE void dot(Sums& sum, const Operand& x, const M* m) { add_product(sum, x, *m); }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, x); }
};

#if defined(__AVX512BF16__)
struct BFloat16 {
  static constexpr int kPair = 2, kItem = 2, kMult = 1;
  using M = uint32_t;  // two bfloat16
  using Operand = Parts<BitsPart>;
  static KV_INLINE Operand read(const uint8_t* at) { return read_parts<BitsPart>(at); }
  static KV_INLINE Operand read(const uint8_t* low, const uint8_t* high) { return read_parts<BitsPart>(low, high); }
  static KV_INLINE void dot(Sums& sum, const Operand& x, const M* m) {
    sum.part[0] = (FloatPart)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)x.part[0],
                                              (__m512bh)_mm512_set1_epi32(static_cast<int>(*m)));
  }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, (u32x8)_mm512_cvtneps_pbh((__m512)x)); }
};
#else
struct BFloat16 {
  static constexpr int kPair = 2, kItem = 2, kMult = 2;
  using M = float;
  struct Operand {
    Sums first, second;
  };
  static KV_INLINE Operand read(const uint8_t* at) { return widen(read_parts<BitsPart>(at)); }
  static KV_INLINE Operand read(const uint8_t* low, const uint8_t* high) {
    return widen(read_parts<BitsPart>(low, high));
  }
  static KV_INLINE Operand widen(const Parts<BitsPart>& raw) {
    Operand x;
    for (int p = 0; p < kParts; ++p) {
      x.first.part[p] = (FloatPart)(raw.part[p] << 16);
      x.second.part[p] = (FloatPart)(raw.part[p] & 0xFFFF0000u);
    }
    return x;
  }
  static KV_INLINE void dot(Sums& sum, const Operand& x, const M* m) {
    add_product(sum, x.first, m[0]);
    add_product(sum, x.second, m[1]);
  }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, x); }
};
#endif

}  // namespace kvpager::KV_ISA
