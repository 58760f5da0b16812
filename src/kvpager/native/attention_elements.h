// The types that pages are stored in, as the blocks of attention_blocks.h see them: how 16 items (tokens of the keys,
// channels of the values), each of kPair stored numbers, are read and multiplied. For kernel sources alone.
//
//   M         a multiplier as it lies in memory; kMult of them belong to one item (a query's channels, or weights)
//   Raw       16 items as stored, RawHalf 8
//   dot       sum + item . multiplier, for 16 items and one multiplier
//   pack      16 floats as multipliers
#pragma once

#include "attention_vec.h"

namespace kvpager::KV_ISA {

struct Float32 {
  static constexpr int kPair = 1, kItem = 4, kMult = 1;
  using M = float;
  using Raw = f32x16;
  using RawHalf = f32x8;
  using Operand = f32x16;
  static KV_INLINE Operand widen(Raw raw) { return raw; }
  static KV_INLINE f32x16 dot(f32x16 sum, Operand x, const M* m) { return fma(x, splat(*m), sum); }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, x); }
};

struct Float16 {
  static constexpr int kPair = 1, kItem = 2, kMult = 1;
  using M = float;
  using Raw = u16x16;
  using RawHalf = u16x8;
  using Operand = f32x16;
  static KV_INLINE Operand widen(Raw raw) { return widen_f16(raw); }
  static KV_INLINE f32x16 dot(f32x16 sum, Operand x, const M* m) { return fma(x, splat(*m), sum); }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, x); }
};

#if defined(__AVX512BF16__)
struct BFloat16 {
  static constexpr int kPair = 2, kItem = 2, kMult = 1;
  using M = uint32_t;  // two bfloat16
  using Raw = u32x16;
  using RawHalf = u32x8;
  using Operand = u32x16;
  static KV_INLINE Operand widen(Raw raw) { return raw; }
  static KV_INLINE f32x16 dot(f32x16 sum, Operand x, const M* m) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_epi32(static_cast<int>(*m)));
  }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, (u32x8)_mm512_cvtneps_pbh((__m512)x)); }
};
#else
struct BFloat16 {
  static constexpr int kPair = 2, kItem = 2, kMult = 2;
  using M = float;
  using Raw = u32x16;
  using RawHalf = u32x8;
  struct Operand {
    f32x16 first, second;
  };
  static KV_INLINE Operand widen(Raw raw) { return {(f32x16)(raw << 16), (f32x16)(raw & 0xFFFF0000u)}; }
  static KV_INLINE f32x16 dot(f32x16 sum, const Operand& x, const M* m) {
    return fma(x.second, splat(m[1]), fma(x.first, splat(m[0]), sum));
  }
  static KV_INLINE void pack(M* to, f32x16 x) { store(to, x); }
};
#endif

}  // namespace kvpager::KV_ISA
