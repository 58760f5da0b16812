// The innermost loops of linear.cpp: a few rows times one group of 32 outputs, for each kind of weights. For kernel sources
// alone, like vec.h. A kind says how a pair of a row's inputs is held (Pair), how a step's weights are read, and how a
// row's pair meets them.
#pragma once

#include "linear.h"
#include "vec.h"

namespace kvpager::KV_ISA {
namespace {

// Most rows of one tile, so that its sums stay in registers.
#if defined(__AVX512F__)
constexpr int kPanel = 12;
#elif defined(__AVX2__)
constexpr int kPanel = 3;
#else
constexpr int kPanel = 2;
#endif

constexpr int64_t kRun = 16;  // pairs of a row that lie together

constexpr int64_t kAhead = 8192;  // bytes of weights asked for ahead of their use: 2048 was measured slower for one row

typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef int16_t i16x32 __attribute__((vector_size(64)));

// a b + c rounded once, where the instruction set can: whether the compiler contracts a product and a sum may differ
// from one instance of a template to the next, and rows must not differ with their number.
#if defined(__AVX512F__)
KV_INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__AVX2__)
struct HalfFloats {
  __m256 low, high;
};
KV_INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  const auto x = __builtin_bit_cast(HalfFloats, a), y = __builtin_bit_cast(HalfFloats, b);
  const auto z = __builtin_bit_cast(HalfFloats, c);
  return __builtin_bit_cast(f32x16, HalfFloats{_mm256_fmadd_ps(x.low, y.low, z.low),
                                               _mm256_fmadd_ps(x.high, y.high, z.high)});
}
#else
KV_INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) { return fma(a, b, c); }
#endif

#if defined(__AVX512BF16__)
struct Bfloat {
  using Pair = uint32_t;  // two bfloat16, the first one low
  using Sum = f32x16;
  using Steps = i32x16;
  static constexpr int64_t kBlockBytes = 64;
  static KV_INLINE Steps read(const uint8_t* w) { return load<i32x16>(w); }
  static KV_INLINE i32x16 spread(Pair x) { return i32x16{} + static_cast<int32_t>(x); }
  static KV_INLINE Sum dot(Sum sum, Steps w, i32x16 x) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
  // Lays out a run of pairs, of which `count` inputs are there.
  static KV_INLINE void lay_out(const uint16_t* x, int64_t count, Pair* to) {
    if (count >= 2 * kRun) {
      store(to, load<i32x16>(x));
    } else {
      store(to, i32x16{});
      std::memcpy(to, x, 2 * static_cast<size_t>(count));
    }
  }
};
#else
struct Bfloat {
  struct Pair {
    float first, second;
  };
  using Sum = f32x16;
  struct Steps {
    f32x16 first, second;
  };
  static constexpr int64_t kBlockBytes = 64;
  static KV_INLINE Steps read(const uint8_t* w) {
    const u32x16 both = load<u32x16>(w);
    return {(f32x16)(both << 16), (f32x16)(both & 0xFFFF0000u)};
  }
  static KV_INLINE Pair spread(Pair x) { return x; }
  static KV_INLINE Sum dot(Sum sum, const Steps& w, Pair x) {
    return fused(w.second, splat(x.second), fused(w.first, splat(x.first), sum));
  }
  static KV_INLINE void lay_out(const uint16_t* x, int64_t count, Pair* to) {
    uint16_t bits[2 * kRun] = {};
    std::memcpy(bits, x, 2 * static_cast<size_t>(count < 2 * kRun ? count : 2 * kRun));
    for (int half = 0; half < 2; ++half) store(to + half * kRun / 2, widen_bf16(load<u16x16>(bits + half * kRun)));
  }
};
#endif

// int8 weights meet inputs rounded to 16 bits: products and their sums over a chunk of 512 inputs are exact
// (512 * 127 * 32767 < 2^31), so only the weights' rounding matters.
struct Int8 {
  using Pair = uint32_t;  // two int16, the first one low
  using Sum = i32x16;
  using Steps = i16x32;
  static constexpr int64_t kBlockBytes = 32;
  static KV_INLINE i32x16 spread(Pair x) { return i32x16{} + static_cast<int32_t>(x); }
#if defined(__AVX512BW__)
  static KV_INLINE Steps read(const uint8_t* w) {
    return (i16x32)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  }
#else
  static KV_INLINE Steps read(const uint8_t* w) { return __builtin_convertvector(load<i8x32>(w), i16x32); }
#endif
#if defined(__AVX512VNNI__)
  static KV_INLINE Sum dot(Sum sum, Steps w, i32x16 x) {
    return (i32x16)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
  }
#elif defined(__AVX512BW__)
  static KV_INLINE Sum dot(Sum sum, Steps w, i32x16 x) {
    return sum + (i32x16)_mm512_madd_epi16((__m512i)w, (__m512i)x);
  }
#elif defined(__AVX2__)
  struct Halves {
    __m256i low, high;
  };
  static KV_INLINE Sum dot(Sum sum, Steps w, i32x16 x) {
    const Halves a = __builtin_bit_cast(Halves, w), b = __builtin_bit_cast(Halves, x);
    const Halves products{_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)};
    return sum + __builtin_bit_cast(i32x16, products);
  }
#else
  static KV_INLINE Sum dot(Sum sum, Steps w, i32x16 x) {
    const i32x16 both = (i32x16)w;
    return sum + ((both << 16) >> 16) * ((x << 16) >> 16) + (both >> 16) * (x >> 16);
  }
#endif
};

// Adds the products of `steps` pairs to sums[M][32] (from zero where `first`); w is a group's weights from the pair
// where x, the rows' pairs [steps / kRun][M][kRun], starts. scales [M]: what a whole number of int8's sums stands for.
template <class Kind, int M>
void tile(const uint8_t* w, const typename Kind::Pair* x, int64_t steps, float* sums, bool first,
          const float* scales) {
  constexpr bool whole = sizeof(typename Kind::Steps) == sizeof(i16x32) && Kind::kBlockBytes == 32;
  typename Kind::Sum sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int b = 0; b < 2; ++b) {
      sum[m][b] = typename Kind::Sum{};
      if constexpr (!whole)
        if (!first) sum[m][b] = load<f32x16>(sums + m * kGroup + b * kLanes);
    }
  for (int64_t left = steps; left > 0; left -= kRun, x += M * kRun) {
    const int64_t run = left < kRun ? left : kRun;
    for (int64_t s = 0; s < run; ++s, w += 2 * Kind::kBlockBytes) {
      for (int64_t line = 0; line < 2 * Kind::kBlockBytes; line += 64) __builtin_prefetch(w + kAhead + line);
      const auto w0 = Kind::read(w), w1 = Kind::read(w + Kind::kBlockBytes);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const auto both = Kind::spread(x[m * kRun + s]);
        sum[m][0] = Kind::dot(sum[m][0], w0, both);
        sum[m][1] = Kind::dot(sum[m][1], w1, both);
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int b = 0; b < 2; ++b) {
      float* to = sums + m * kGroup + b * kLanes;
      if constexpr (whole) {
        const f32x16 before = first ? f32x16{} : load<f32x16>(to);
        store(to, fused(__builtin_convertvector(sum[m][b], f32x16), splat(scales[m]), before));
      } else {
        store(to, sum[m][b]);
      }
    }
}

template <class Kind>
using Tile = void (*)(const uint8_t*, const typename Kind::Pair*, int64_t, float*, bool, const float*);

// The tile for so many rows, 1 to M.
template <class Kind, int M = kPanel>
KV_INLINE Tile<Kind> tile_of(int64_t rows) {
  if constexpr (M > 1)
    if (rows < M) return tile_of<Kind, M - 1>(rows);
  return &tile<Kind, M>;
}

}  // namespace
}  // namespace kvpager::KV_ISA
