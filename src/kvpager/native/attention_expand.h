// Pages of int8 as pages of bfloat16, in scratch memory. For kernel sources alone.
#pragma once

#include "attention.h"
#include "attention_vec.h"

namespace kvpager::KV_ISA {

// 16 codes, of which even and odd ones have scales of their own, as bfloat16
KV_INLINE void expand(const uint8_t* codes, f32x16 scales, uint8_t* to) {
  const f32x16 x = __builtin_convertvector(load<i8x16>(codes), f32x16);
  store(to, narrow_bf16(x * scales));
}

KV_INLINE f32x16 scale_pair(const uint8_t* at) {
  const float a = bf16_to_float(load<uint16_t>(at)), b = bf16_to_float(load<uint16_t>(at + 2));
  return f32x16{a, b, a, b, a, b, a, b, a, b, a, b, a, b, a, b};
}

inline void expand_keys(const Layout& layout, const uint8_t* page, uint8_t* to) {
  const int unit = 2 * layout.block;  // codes of one pair of channels
  for (int block = 0; block < layout.page_size / layout.block; ++block)
    for (int pair = 0; pair < layout.head_dim / 2; ++pair) {
      const f32x16 scales = scale_pair(page + layout.key_scales + 4 * pair);
      const int64_t at = (static_cast<int64_t>(block) * (layout.head_dim / 2) + pair) * unit;
      for (int i = 0; i < unit; i += 16) expand(page + at + i, scales, to + 2 * (at + i));
    }
}

inline void expand_values(const Layout& layout, const uint8_t* page, uint8_t* to) {
  const uint8_t* values = page + layout.values;
  for (int pair = 0; pair < layout.page_size / 2; ++pair) {
    const f32x16 scales = scale_pair(page + layout.value_scales + 4 * pair);
    const int64_t at = static_cast<int64_t>(pair) * layout.head_dim * 2;
    for (int i = 0; i < 2 * layout.head_dim; i += 16) expand(values + at + i, scales, to + 2 * (at + i));
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
