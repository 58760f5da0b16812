// Building digests, for digest.cpp alone: the arithmetic of kvpager.core.digest.CodedDigest.
#pragma once

#include "digest.h"
#include "vec.h"

namespace kvpager::KV_ISA {
namespace {

constexpr int kMostDim = 256;

// One page: keys [P][D]. `base` and `unit` become each channel's number for code 0 and the size of a step.
inline void measure(const float* keys, int page_size, int head_dim, uint8_t* steps, int8_t* offsets, float* scales,
                    float* base, float* unit) {
  const float tiny = 1e-30f;  // a scale above zero for channels that are all zeros
  float low[kMostDim], high[kMostDim];
  std::memcpy(low, keys, sizeof(float) * static_cast<size_t>(head_dim));
  std::memcpy(high, keys, sizeof(float) * static_cast<size_t>(head_dim));
  for (int t = 1; t < page_size; ++t)
    for (int d = 0; d < head_dim; ++d) {
      const float x = keys[t * head_dim + d];
      low[d] = x < low[d] ? x : low[d];
      high[d] = x > high[d] ? x : high[d];
    }
  float most = 0;
  for (int d = 0; d < head_dim; ++d) most = __builtin_fabsf(low[d]) > most ? __builtin_fabsf(low[d]) : most;
  scales[0] = most / 127 > tiny ? most / 127 : tiny;
  for (int d = 0; d < head_dim; ++d) {
    float x = __builtin_floorf(low[d] / scales[0]);
    x = x > -128 ? x : -128;
    x = x < 127 ? x : 127;
    offsets[d] = static_cast<int8_t>(x);
    base[d] = x * scales[0];
  }
  most = 0;
  for (int d = 0; d < head_dim; ++d) {
    unit[d] = (high[d] - base[d]) / 3;
    most = unit[d] > most ? unit[d] : most;
  }
  scales[1] = most / 255 > tiny ? most / 255 : tiny;
  for (int d = 0; d < head_dim; ++d) {
    float x = __builtin_ceilf(unit[d] / scales[1]);
    x = x > 1 ? x : 1;
    x = x < 255 ? x : 255;
    steps[d] = static_cast<uint8_t>(x);
    unit[d] = x * scales[1];
  }
}

// Where the code of a token's channel lies: byte, and shift within it (see digest.h).
struct Place {
  int byte, shift;
};

inline Place place(int page_size, int head_dim, int token, int channel) {
  const int lanes = page_size < 16 ? page_size : 16;
  const int lane = token % lanes, vector = channel / 16, within = channel % 16;
  const int begin = token / lanes * (lanes * head_dim / 4) + vector * 4 * lanes;
  if (16 * vector + 16 <= head_dim) return {begin + 4 * lane + within % 4, within / 4 * 2};
  const int half = lanes / 2;
  return {begin + 4 * (lane % half) + within % 4, within / 4 * 2 + lane / half * 4};
}

inline void build(const DigestShape& shape, const DigestLayer& layer, const int64_t* rows, const float* keys,
                  int64_t pages) {
  const int heads = shape.heads, size = shape.page_size, dim = shape.head_dim;
  float base[kMostDim], unit[kMostDim];
  for (int64_t n = 0; n < pages * heads; ++n) {
    const size_t at = static_cast<size_t>(rows[n / heads] * heads + n % heads);
    const float* page = keys + n * size * dim;
    measure(page, size, dim, layer.steps + at * dim, layer.offsets + at * dim, layer.scales + 2 * at, base, unit);
    uint8_t* codes = layer.codes + at * shape.code_bytes();
    std::memset(codes, 0, shape.code_bytes());
    for (int t = 0; t < size; ++t) {
      uint8_t code[kMostDim];
      for (int d = 0; d < dim; ++d) {
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
        float x = (page[t * dim + d] - base[d]) / unit[d];
        x = x > 0 ? x : 0;
        x = x < 3 ? x : 3;
        code[d] = static_cast<uint8_t>((x + magic) - magic);
      }
      int d = 0;
      for (; d + 16 <= dim; d += 16) {  // as below, four channels at a time: codes never reach the next byte
        uint32_t word[4];
        std::memcpy(word, code + d, sizeof word);
        word[0] |= word[1] << 2 | word[2] << 4 | word[3] << 6;
        std::memcpy(codes + place(size, dim, t, d).byte, word, sizeof word[0]);
      }
      for (; d < dim; ++d) {
        const Place to = place(size, dim, t, d);
        codes[to.byte] = static_cast<uint8_t>(codes[to.byte] | code[d] << to.shift);
      }
    }
  }
}

}  // namespace
}  // namespace kvpager::KV_ISA
