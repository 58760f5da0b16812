// Integer dot products of 2-bit keys, for digest.cpp alone: a vector holds four channels (bytes) of W tokens (lanes).
#pragma once

#include "vec.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define KV_VNNI 1
#else
#define KV_VNNI 0
#endif

namespace kvpager::KV_ISA {

// Lanes that a vector of keys has: what a register holds. Wider vectors than that end up in memory (GCC 12).
#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

template <int W>
struct Lanes;

template <>
struct Lanes<16> {
  typedef f32x16 f32;
  typedef i32x16 i32;
  typedef u32x16 u32;
  typedef uint32_t u32_half __attribute__((vector_size(32)));
};

template <>
struct Lanes<8> {
  typedef f32x8 f32;
  typedef int32_t i32 __attribute__((vector_size(32)));
  typedef u32x8 u32;
  typedef uint32_t u32_half __attribute__((vector_size(16)));
};

KV_INLINE u32x16 join(u32x8 low, u32x8 high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
KV_INLINE u32x8 join(Lanes<8>::u32_half low, Lanes<8>::u32_half high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

// Sums of the products of two signed 16-bit halves, lane by lane.
#if defined(__AVX512BW__)
KV_INLINE i32x16 madd(i32x16 a, i32x16 b) { return (i32x16)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#endif
#if defined(__AVX2__)
KV_INLINE Lanes<8>::i32 madd(Lanes<8>::i32 a, Lanes<8>::i32 b) {
  return (Lanes<8>::i32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#endif
#if !defined(__AVX512BW__)
template <class V>
KV_INLINE V madd(V a, V b) {
#if defined(__AVX2__)
  typedef __m256i Part;
#elif defined(__SSE2__)
  typedef __m128i Part;
#endif
#if defined(__SSE2__)
  Part x[sizeof(V) / sizeof(Part)], y[sizeof(V) / sizeof(Part)];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (size_t i = 0; i < sizeof(V) / sizeof(Part); ++i)
#if defined(__AVX2__)
    x[i] = _mm256_madd_epi16(x[i], y[i]);
#else
    x[i] = _mm_madd_epi16(x[i], y[i]);
#endif
  std::memcpy(&a, x, sizeof a);
  return a;
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
#endif

// Weights of four channels: four signed bytes, or without dot-product instructions the pairs of 16 bits (channels 0 and
// 2, then 1 and 3). kWeights: how many 32-bit words these are.
constexpr int kWeights = KV_VNNI ? 1 : 2;

// sum + keys (unsigned bytes) . weights
template <class I, class U>
KV_INLINE I dot(I sum, U keys, const int32_t* weights) {
#if KV_VNNI
  if constexpr (sizeof(U) == 64)
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)keys, _mm512_set1_epi32(weights[0]));
  else
    return (I)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)keys, _mm256_set1_epi32(weights[0]));
#else
  return sum + madd((I)(keys & 0x00FF00FFu), I{} + weights[0]) + madd((I)((keys >> 8) & 0x00FF00FFu), I{} + weights[1]);
#endif
}

// A key's step as a whole number: code 0, 1, 2, 3 of a channel with step s stand for 0, a, s - a, s, where a is s / 3 to
// nearest. Tables hold what is needed to look four channels' codes up at once.
#if defined(__AVX2__)
struct Tables {
  alignas(64) uint32_t words[256];  // the four values of each channel as bytes

  KV_INLINE void fill(const uint8_t* steps, int head_dim) {
    for (int d = 0; d < head_dim; d += 16) {
      typedef uint8_t u8x16 __attribute__((vector_size(16)));
      u8x16 bytes{};
      if (d + 16 <= head_dim) std::memcpy(&bytes, steps + d, 16);
      else std::memcpy(&bytes, steps + d, 8);
      const u32x16 s = __builtin_convertvector(bytes, u32x16);
      const u32x16 a = (s * 171u + 171u) >> 9;
      store(words + d, (a << 8) | ((s - a) << 16) | (s << 24));
    }
  }

  template <class U>
  KV_INLINE U look_up(U codes, int group) const {
    const U index = (codes & 0x03030303u) | 0x0C080400u;
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(words + 4 * group));
#if defined(__AVX512BW__)
    if constexpr (sizeof(U) == 64)  // masked by nothing: GCC 12 warns of the other form's undefined lanes
      return (U)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xFFFF, table), (__m512i)index);
    else
#endif
      return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)index);
  }
};
#else
struct Tables {
  alignas(64) uint8_t one[256], two[256];  // values of codes 1 and 2; 3 is their sum

  KV_INLINE void fill(const uint8_t* steps, int head_dim) {
    for (int d = 0; d < head_dim; ++d) {
      one[d] = static_cast<uint8_t>((steps[d] * 171u + 171u) >> 9);
      two[d] = static_cast<uint8_t>(steps[d] - one[d]);
    }
  }

  template <class U>
  KV_INLINE U look_up(U codes, int group) const {
    uint32_t ones, twos;
    std::memcpy(&ones, one + 4 * group, 4);
    std::memcpy(&twos, two + 4 * group, 4);
    const U low = codes & 0x01010101u, high = (codes >> 1) & 0x01010101u;
    return (((low << 8) - low) & ones) + (((high << 8) - high) & twos);  // a byte of 1 becomes one of 255
  }
};
#endif

// Calls use(group, turn, keys) for each four channels of W of a block's B tokens (the first W, or by `side` those after
// them), in order; `turn` is group % 4, as a constant.
template <int B, int W, class F>
KV_INLINE void each_group(const uint8_t* codes, int side, int head_dim, const Tables& tables, F&& use) {
  typedef typename Lanes<W>::u32 U;
  typedef typename Lanes<W>::u32_half Half;
  int group = 0;
  for (; 4 * group + 16 <= head_dim; group += 4, codes += 4 * B) {
    const U packed = load<U>(codes + 4 * W * side);
    use(group, 0, tables.look_up(packed, group));
    use(group + 1, 1, tables.look_up(packed >> 2, group + 1));
    use(group + 2, 2, tables.look_up(packed >> 4, group + 2));
    use(group + 3, 3, tables.look_up(packed >> 6, group + 3));
  }
  if (4 * group < head_dim) {
    U packed;
    if constexpr (W == B) {
      const Half half = load<Half>(codes);
      packed = join(half, half >> 4);
    } else {
      packed = load<U>(codes) >> (4 * side);
    }
    use(group, 0, tables.look_up(packed, group));
    use(group + 1, 1, tables.look_up(packed >> 2, group + 1));
  }
}

// 2^x for x <= 127, and 0 below -126. Relative error below 1e-4: a cubic, which is much for an estimate.
KV_INLINE f32x16 exp2_fast(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const f32x16 t = x + magic;
  const f32x16 r = x - (t - magic);
  f32x16 p = splat(0.055171065f);
  p = fma(p, r, splat(0.24260992f));
  p = fma(p, r, splat(0.69326097f));
  p = fma(p, r, splat(0.99992815f));
  // The low bits of t hold the whole part. Unsigned, for below -126, where the result is not used, the sum may overflow.
  const f32x16 result = (f32x16)((u32x16)p + ((u32x16)t << 23));
  return x < -126.0f ? f32x16{} : result;
}

KV_INLINE int32_t total(i32x16 x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return x[0] + x[1];
}

KV_INLINE float largest(f32x16 x) {
  x = max(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = max(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = max(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return x[0] > x[1] ? x[0] : x[1];
}

KV_INLINE float largest(f32x8 x) {
  return largest(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7));
}

// Lane i of the result is the sum of rows[i].
KV_INLINE f32x16 sums_of(f32x16 (&rows)[16]) {
  f32x16 eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const f32x16 x = rows[2 * i], y = rows[2 * i + 1];
    eight[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const f32x16 x = eight[2 * i], y = eight[2 * i + 1];
    four[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const f32x16 x = four[2 * i], y = four[2 * i + 1];
    two[i] = __builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
             __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  }
  return __builtin_shufflevector(two[0], two[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(two[0], two[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

}  // namespace kvpager::KV_ISA
