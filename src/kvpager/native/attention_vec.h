// What attention needs beyond vec.h: reductions, a logarithm, and stored numbers of 16 bits. For kernel sources alone.
#pragma once

#include "vec.h"

namespace kvpager::KV_ISA {

typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int16_t i16x16 __attribute__((vector_size(32)));

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;

KV_INLINE float top_of(f32x16 x) {
  f32x8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  const f32x8 b = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  f32x8 c = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
  a = a > c ? a : c;
  c = __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
  a = a > c ? a : c;
  c = __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6);
  a = a > c ? a : c;
  return a[0];
}

KV_INLINE float sum_of(f32x16 x) {
  f32x8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
            __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
  a += __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
  return a[0] + a[1];
}

// The sum of all numbers of n vectors
KV_INLINE float sum_of(const f32x16* v, int n) {
  f32x16 total = v[0];
  for (int i = 1; i < n; ++i) total += v[i];
  return sum_of(total);
}

// Sums over the halves of 8 vectors: lane i of the result is the sum of the lower half of v[i], lane 8 + i of its upper.
KV_INLINE f32x16 half_sums(const f32x16* v) {
  f32x16 b[4], c[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    b[i] = __builtin_shufflevector(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    c[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return __builtin_shufflevector(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// Lane i of the result is the sum of v[i], for 16 vectors.
KV_INLINE f32x16 sums(const f32x16* v) {
  f32x16 a[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  return half_sums(a);
}

// Sums over each page's tokens, of 16 vectors of weights: 32 pages of 8 tokens, 16 of 16 or 8 of 32 (and 8 more numbers
// of no meaning). Returns the sum over all.
inline float page_sums(const f32x16* weights, int page_size, float* found) {
  if (page_size == 8) {  // lane i of a half: page 2 i, lane 8 + i: page 2 i + 1
    float total = 0;
    for (int half = 0; half < 2; ++half) {
      const f32x16 x = half_sums(weights + 8 * half);
      total += sum_of(x);
      store(found + 16 * half, __builtin_shufflevector(x, x, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    }
    return total;
  }
  f32x16 x = sums(weights);
  const float total = sum_of(x);
  if (page_size == 32) {
    x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    x = __builtin_shufflevector(x, x, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
  }
  store(found, x);
  return total;
}

// Lane i of the result is the greatest number of v[i], for 16 vectors.
KV_INLINE f32x16 maxes(const f32x16* v) {
  f32x16 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = max(__builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
               __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    b[i] = max(__builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
               __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    c[i] = max(__builtin_shufflevector(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
               __builtin_shufflevector(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  return max(__builtin_shufflevector(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             __builtin_shufflevector(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}

// 2^x for x up to 127; far below -126 it is 0. Relative error below 3e-7.
KV_INLINE f32x16 exp2(f32x16 x) {
#if defined(__AVX512DQ__)
  const f32x16 r = (f32x16)_mm512_maskz_reduce_ps(0xFFFF, (__m512)x, 1);  // x - floor(x)
  f32x16 p = splat(0.0018671301659196615f);
  p = fma(p, r, splat(0.009017029777169228f));
  p = fma(p, r, splat(0.05579991266131401f));
  p = fma(p, r, splat(0.24016444385051727f));
  p = fma(p, r, splat(0.6931512951850891f));
  p = fma(p, r, splat(1.0f));
  return (f32x16)_mm512_maskz_scalef_ps(0xFFFF, (__m512)p, (__m512)x);
#else
  return exp(x * kLn2);
#endif
}

// Natural logarithm of numbers of 0 (gives -inf) or more. Relative error below 2e-7 (Cephes' polynomial). Where there is
// no AVX-512, numbers below 2^-126 count as about that.
KV_INLINE f32x16 log(f32x16 x) {
#if defined(__AVX512F__)
  f32x16 e = (f32x16)_mm512_maskz_getexp_ps(0xFFFF, (__m512)x) + 1.0f;
  f32x16 m = (f32x16)_mm512_maskz_getmant_ps(0xFFFF, (__m512)x, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_src);  // 0.5 .. 1
#else
  const u32x16 bits = (u32x16)x;
  f32x16 e = __builtin_convertvector((i32x16)(bits >> 23) - 126, f32x16);
  f32x16 m = (f32x16)((bits & 0x7FFFFFu) | 0x3F000000u);  // 0.5 .. 1
#endif
  const i32x16 low = m < 0.707106781186547524f;
  e = low ? e - 1.0f : e;
  m = (low ? m + m : m) - 1.0f;
  const f32x16 z = m * m;
  f32x16 p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  p = p * m * z + e * -2.12194440e-4f - z * 0.5f;
  const f32x16 result = m + p + e * 0.693359375f;
  return x > 0.0f ? result : splat(-kInf);
}

// Hyperbolic tangent; absolute error below 2e-7.
KV_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 size = max(x, -x);
  const f32x16 e = exp(size * -2.0f);
  const f32x16 t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

// 8 numbers, or bits, and 8 more
KV_INLINE f32x16 joined(f32x8 a, f32x8 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
KV_INLINE u32x16 joined(u32x8 a, u32x8 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
KV_INLINE u16x16 joined(u16x8 a, u16x8 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// float16 by its bits; NaN stays NaN. F, U and H: as many floats, numbers of 32 bits and of 16 bits.
template <class F, class U, class H>
KV_INLINE F widen_f16(H half) {
#if defined(__AVX512F__)
  if constexpr (sizeof(F) == 64) return (F)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)half);
#elif defined(__F16C__)
  if constexpr (sizeof(F) == 32) return (F)_mm256_cvtph_ps((__m128i)half);
#endif
  const U bits = __builtin_convertvector(half, U);
  const U size = (bits & 0x7FFFu) << 13;
  // the exponent's bias is 112 less; numbers below the smallest normal one come out right by the multiplication
  const F scaled = (F)size * 5.192296858534828e33f;
  const U plain = size >= 0x0F800000u ? size | 0x7F800000u : (U)scaled;
  return (F)(plain | ((bits & 0x8000u) << 16));
}

KV_INLINE f32x16 widen_f16(u16x16 half) {
#if defined(__F16C__) && !defined(__AVX512F__)
  const u16x8 low = __builtin_shufflevector(half, half, 0, 1, 2, 3, 4, 5, 6, 7);
  const u16x8 high = __builtin_shufflevector(half, half, 8, 9, 10, 11, 12, 13, 14, 15);
  return joined(widen_f16<f32x8, u32x8>(low), widen_f16<f32x8, u32x8>(high));
#else
  return widen_f16<f32x16, u32x16>(half);
#endif
}

// float16 bits of numbers up to 65504, to nearest, ties to even
KV_INLINE u16x16 narrow_f16(f32x16 x) {
#if defined(__AVX512F__)
  return (u16x16)_mm512_maskz_cvtps_ph(0xFFFF, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const u32x16 bits = (u32x16)x;
  const u32x16 sign = (bits >> 16) & 0x8000u;
  const u32x16 size = bits & 0x7FFFFFFFu;
  // normal numbers: round the 13 bits that go, and move the exponent's bias
  const u32x16 normal = (size + 0xC8000FFFu + ((size >> 13) & 1)) >> 13;
  // below 2^-14: adding 0.5 leaves the wanted bits, rounded, at the end
  const u32x16 tiny = (u32x16)((f32x16)size + 0.5f) - 0x3F000000u;
  return __builtin_convertvector((size < 0x38800000u ? tiny : normal) | sign, u16x16);
#endif
}

}  // namespace kvpager::KV_ISA
