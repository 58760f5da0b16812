// Root-mean-square normalisation (Zhang and Sennrich, 2019) and rotary position embedding (Su et al., 2021) of bfloat16
// rows, with the roundings of the models' own code.
#pragma once

#include <cstdint>

#include "isa.h"

namespace kvpager {

struct NormTable {
  // y = weight * bfloat16(x / rms(x)), x and y bfloat16 [rows][width], weight bfloat16 [width]. y may be x.
  void (*rms)(const uint16_t* x, const uint16_t* weight, float epsilon, int64_t rows, int64_t width, uint16_t* y);
  // y = bfloat16(x / rms(x) * (1 + weight)): Gemma's
  void (*rms_plus_one)(const uint16_t* x, const uint16_t* weight, float epsilon, int64_t rows, int64_t width,
                       uint16_t* y);
  // to = bfloat16(x cos) + bfloat16(half-turned x sin), where a half-turned row is (-second half, first half).
  // x and `to` are [tokens][heads][width], cosine and sine [angles][width]; token t has angle t % angles.
  // `to` may be x.
  void (*rotate)(const uint16_t* x, const uint16_t* cosine, const uint16_t* sine, int64_t tokens, int64_t angles,
                 int64_t heads, int64_t width, uint16_t* to);
};

KV_DECLARE_TABLE(NormTable, norm)

}  // namespace kvpager
