// Vectors of 16 floats by GCC's and Clang's vector extensions, for kernel sources alone (each is compiled for one
// instruction set; the compiler splits what the hardware does not hold in one register).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define KV_INLINE inline __attribute__((always_inline))

namespace kvpager::KV_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

template <class V>
KV_INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
KV_INLINE void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

KV_INLINE f32x16 splat(float x) { return x - f32x16{}; }  // costs nothing: x - 0 is x, while 0 + x may not be

// bfloat16 by its bits
KV_INLINE float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// to nearest, ties to even; NaN stays NaN
KV_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

KV_INLINE f32x16 widen_bf16(u16x16 bits) {
  return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

KV_INLINE u16x16 narrow_bf16(f32x16 x) {  // finite numbers only
  const u32x16 bits = (u32x16)x;
  return __builtin_convertvector((bits + (((bits >> 16) & 1) + 0x7FFFu)) >> 16, u16x16);
}

KV_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }  // contracted by the compiler where it can

KV_INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

// e^x for x <= 88; below -87.3 it is 0. Relative error below 2e-7 (Cephes' polynomial of degree 5).
KV_INLINE f32x16 exp(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const f32x16 t = x * 1.44269504088896341f + magic;
  const f32x16 n = t - magic;
  f32x16 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  const i32x16 scale = ((i32x16)t << 23) + 0x3F800000;  // the low bits of t hold n
  const f32x16 result = p * (f32x16)scale;
  return x < -87.3f ? f32x16{} : result;
}

}  // namespace kvpager::KV_ISA
