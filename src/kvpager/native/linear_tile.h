// The innermost loops of linear.cpp: a few rows times one group of 32 outputs, for each kind of weights. For kernel sources
// alone, like vec.h. A kind says how a pair of a row's inputs is held (Pair), how a step's weights are read, and how a
// row's pair meets them.
#pragma once

#include "linear.h"
#include "parts.h"

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

typedef int8_t CodesPart __attribute__((vector_size(2 * kWide)));
typedef int16_t PairsPart __attribute__((vector_size(4 * kWide)));

// a b + c rounded once, where the instruction set can: whether the compiler contracts a product and a sum may differ
// from one instance of a template to the next, and rows must not differ with their number.
KV_INLINE FloatPart fused(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
#if !defined(__AVX512F__)
KV_INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  auto x = __builtin_bit_cast(Sums, a), y = __builtin_bit_cast(Sums, b), z = __builtin_bit_cast(Sums, c);
  for (int p = 0; p < kParts; ++p) z.part[p] = fused(x.part[p], y.part[p], z.part[p]);
  return __builtin_bit_cast(f32x16, z);
}
#endif

#if defined(__AVX512BF16__)
struct Bfloat {
  using Pair = uint32_t;  // two bfloat16, the first one low
  using Sum = FloatPart;
  using Steps = WholePart;
  static constexpr int64_t kBlockBytes = 64;
  static KV_INLINE Steps read(const uint8_t* w) { return load<Steps>(w); }
  static KV_INLINE WholePart spread(Pair x) { return WholePart{} + static_cast<int32_t>(x); }
  static KV_INLINE Sum dot(Sum sum, Steps w, WholePart x) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
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
  using Sum = FloatPart;
  struct Steps {
    Sum first, second;
  };
  static constexpr int64_t kBlockBytes = 64;
  static KV_INLINE Steps read(const uint8_t* w) {
    const BitsPart both = load<BitsPart>(w);
    return {(Sum)(both << 16), (Sum)(both & 0xFFFF0000u)};
  }
  static KV_INLINE Pair spread(Pair x) { return x; }
  static KV_INLINE Sum dot(Sum sum, const Steps& w, Pair x) {
    return fused(w.second, x.second - Sum{}, fused(w.first, x.first - Sum{}, sum));
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
  using Sum = WholePart;
  using Steps = PairsPart;
  static constexpr int64_t kBlockBytes = 32;
  static KV_INLINE WholePart spread(Pair x) { return WholePart{} + static_cast<int32_t>(x); }
  static KV_INLINE Steps read(const uint8_t* w) {
#if defined(__AVX512BW__)
    return (Steps)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
#else
    return __builtin_convertvector(load<CodesPart>(w), Steps);
#endif
  }
  static KV_INLINE Sum dot(Sum sum, Steps w, WholePart x) {
#if defined(__AVX512VNNI__)
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return sum + (Sum)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    return sum + (Sum)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    const Sum both = (Sum)w;
    return sum + ((both << 16) >> 16) * ((x << 16) >> 16) + (both >> 16) * (x >> 16);
#endif
  }
};

// Adds the products of `steps` pairs to sums[M][32] (from zero where `first`); w is a group's weights from the pair
// where x, the rows' pairs [steps / kRun][M][kRun], starts. scales [M]: what a whole number of int8's sums stands for.
template <class Kind, int M>
void tile(const uint8_t* w, const typename Kind::Pair* x, int64_t steps, float* sums, bool first,
          const float* scales) {
  constexpr bool whole = Kind::kBlockBytes == 32;
  constexpr int64_t kPartBytes = Kind::kBlockBytes / kParts;
  constexpr int kTogether = kParts == 1 ? 2 : 1;  // parts of the weights that are held at a time, beside the sums
  typename Kind::Sum sum[M][2 * kParts];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < 2 * kParts; ++p) {
      sum[m][p] = typename Kind::Sum{};
      if constexpr (!whole)
        if (!first) sum[m][p] = load<FloatPart>(sums + m * kGroup + p * kWide);
    }
  for (int64_t left = steps; left > 0; left -= kRun, x += M * kRun) {
    const int64_t run = left < kRun ? left : kRun;
    for (int64_t s = 0; s < run; ++s, w += 2 * Kind::kBlockBytes) {
      for (int64_t line = 0; line < 2 * Kind::kBlockBytes; line += 64) __builtin_prefetch(w + kAhead + line);
#pragma GCC unroll 8
      for (int p = 0; p < 2 * kParts; p += kTogether) {
        typename Kind::Steps part[kTogether];
        for (int t = 0; t < kTogether; ++t) part[t] = Kind::read(w + (p + t) * kPartBytes);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const auto both = Kind::spread(x[m * kRun + s]);
          for (int t = 0; t < kTogether; ++t) sum[m][p + t] = Kind::dot(sum[m][p + t], part[t], both);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < 2 * kParts; ++p) {
      float* to = sums + m * kGroup + p * kWide;
      if constexpr (whole) {
        const FloatPart before = first ? FloatPart{} : load<FloatPart>(to);
        store(to, fused(__builtin_convertvector(sum[m][p], FloatPart), scales[m] - FloatPart{}, before));
      } else {
        store(to, sum[m][p]);
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
