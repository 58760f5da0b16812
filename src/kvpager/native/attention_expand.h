// Pages of int8 as pages of bfloat16, in scratch memory. For kernel sources alone.
#pragma once

#include "attention.h"
#include "attention_vec.h"

namespace kvpager::KV_ISA {

// Two bfloat16 scales, for even and for odd codes
KV_INLINE f32x16 scale_pair(const uint8_t* at) {
  const u32x16 both = u32x16{} + load<uint32_t>(at);
  const u32x16 odd = {0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u, 0, ~0u};
  return (f32x16)((both & 0xFFFF0000u & odd) | (both << 16 & ~odd));
}

// 16 codes as bfloat16
KV_INLINE void expand(const uint8_t* codes, f32x16 scales, uint8_t* to) {
#if defined(__AVX512BF16__)
  const __m512 x = _mm512_maskz_cvtepi32_ps(0xFFFF, _mm512_maskz_cvtepi8_epi32(0xFFFF, (__m128i)load<i8x16>(codes)));
  store(to, (u16x16)_mm512_cvtneps_pbh(x * (__m512)scales));
#else
  store(to, narrow_bf16(__builtin_convertvector(load<i8x16>(codes), f32x16) * scales));
#endif
}

// `ahead`: another page's, wanted soon
inline void expand_keys(const Layout& layout, const uint8_t* page, const uint8_t* ahead, uint8_t* to) {
  const int unit = 2 * layout.block;  // codes of one pair of channels
  for (int block = 0; block < layout.page_size / layout.block; ++block)
    for (int pair = 0; pair < layout.head_dim / 2; ++pair) {
      const f32x16 scales = scale_pair(page + layout.key_scales + 4 * pair);
      const int64_t at = (static_cast<int64_t>(block) * (layout.head_dim / 2) + pair) * unit;
      __builtin_prefetch(ahead + at, 0, 2);
      for (int i = 0; i < unit; i += 16) expand(page + at + i, scales, to + 2 * (at + i));
    }
}

inline void expand_values(const Layout& layout, const uint8_t* page, const uint8_t* ahead, uint8_t* to) {
  const uint8_t* values = page + layout.values;
  for (int pair = 0; pair < layout.page_size / 2; ++pair) {
    const f32x16 scales = scale_pair(page + layout.value_scales + 4 * pair);
    const int64_t at = static_cast<int64_t>(pair) * layout.head_dim * 2;
    for (int i = 0; i < 2 * layout.head_dim; i += 16) {
      if (i % 64 == 0) __builtin_prefetch(ahead + at + i, 0, 2);
      expand(values + at + i, scales, to + 2 * (at + i));
    }
  }
}

// From a staging slot: float32 [P][D]
inline void expand_slot_keys(const Layout& layout, const float* keys, uint16_t* to) {
  for (int t = 0; t < layout.page_size; ++t)
    for (int c = 0; c < layout.head_dim; ++c) {
      const int64_t unit = static_cast<int64_t>(t / layout.block) * (layout.head_dim / 2) + c / 2;
      to[(unit * layout.block + t % layout.block) * 2 + c % 2] =
          float_to_bf16(keys[static_cast<int64_t>(t) * layout.head_dim + c]);
    }
}

inline void expand_slot_values(const Layout& layout, const float* values, uint16_t* to) {
  for (int t = 0; t < layout.page_size; ++t)
    for (int c = 0; c < layout.head_dim; ++c)
      to[(static_cast<int64_t>(t / 2) * layout.head_dim + c) * 2 + t % 2] =
          float_to_bf16(values[static_cast<int64_t>(t) * layout.head_dim + c]);
}

}  // namespace kvpager::KV_ISA
