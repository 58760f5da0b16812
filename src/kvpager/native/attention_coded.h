// Scores and mixing straight from int8 pages by integer dot products, for a few rows (queries): the page's scales go
// into the queries and the weights, which are held in 16 bits for one page at a time. For kernel sources alone.
#pragma once

#include "attention_blocks.h"
#include "attention_expand.h"

namespace kvpager::KV_ISA {

#if defined(__AVX512VNNI__)
constexpr bool kHasCoded = true;

typedef int8_t i8x32 __attribute__((vector_size(32)));

// 16 items, each of two codes
KV_INLINE __m512i coded_items(const uint8_t* at) {
  return _mm512_maskz_cvtepi8_epi16(0xFFFFFFFF, (__m256i)load<i8x32>(at));
}

KV_INLINE __m512i coded_dot(__m512i sum, __m512i items, const int16_t* pair) {
  return _mm512_dpwssd_epi32(sum, items, _mm512_set1_epi32(load<int32_t>(pair)));
}

KV_INLINE f32x16 counted(__m512i sum) { return __builtin_convertvector((i32x16)sum, f32x16); }

// x[i] * scales[i] as 16-bit whole multiples of a step, which is returned. `scales`: bfloat16; n is a multiple of 16.
KV_INLINE float in_16_bits(const float* x, const uint8_t* scales, int n, int16_t* to) {
  f32x16 most = {};
  for (int i = 0; i < n; i += 16) {
    const f32x16 y = load<f32x16>(x + i) * widen_bf16(load<u16x16>(scales + 2 * i));
    most = max(most, max(y, -y));
  }
  const float top = top_of(most);
  // below it, dividing would not be finite: such a page's share is nothing
  const f32x16 steps = splat(top > 1e-33f ? 32767.0f / top : 0.0f);
  for (int i = 0; i < n; i += 16) {
    const f32x16 y = load<f32x16>(x + i) * widen_bf16(load<u16x16>(scales + 2 * i)) * steps;
    store(to + i, (i16x16)_mm512_maskz_cvtepi32_epi16(0xFFFF, _mm512_maskz_cvtps_epi32(0xFFFF, (__m512)y)));
  }
  return top > 1e-33f ? top / 32767.0f : 0.0f;
}

// scores[r * width .. + 16] = q[r] . keys * steps[r], for 16 keys
template <int kCount>
void coded_score_rows(const uint8_t* k, const int16_t* q, int64_t stride, int pairs, const uint8_t* ahead,
                      const float* steps, float* scores, int64_t width) {
  constexpr int kSplit = kCount == 1 ? 4 : 2;
  __m512i sum[kCount][kSplit] = {};
  for (int i = 0; i < pairs; i += kSplit) {
    prefetch(ahead + 32 * i);
    for (int s = 0; s < kSplit; ++s) {
      const __m512i x = coded_items(k + 32 * (i + s));
      for (int r = 0; r < kCount; ++r) sum[r][s] = coded_dot(sum[r][s], x, q + r * stride + 2 * (i + s));
    }
  }
  for (int r = 0; r < kCount; ++r) {
    for (int s = 1; s < kSplit; ++s) sum[r][0] = _mm512_add_epi32(sum[r][0], sum[r][s]);
    store(scores + r * width, counted(sum[r][0]) * steps[r]);
  }
}

// out[r] += weights[r] . values * steps[r], for 16 * kWide channels of one page
template <int kCount, int kWide>
void coded_mix_rows(const uint8_t* v, int64_t stride, int pairs, const uint8_t* ahead, const int16_t* weights,
                    int64_t weight_stride, const float* steps, float* out, int64_t out_stride) {
  __m512i sum[kCount][kWide] = {};
  for (int p = 0; p < pairs; ++p, v += stride, ahead += stride)
    for (int j = 0; j < kWide; ++j) {
      if (j % 2 == 0) prefetch(ahead + 32 * j);
      const __m512i x = coded_items(v + 32 * j);
      for (int r = 0; r < kCount; ++r) sum[r][j] = coded_dot(sum[r][j], x, weights + r * weight_stride + 2 * p);
    }
  for (int r = 0; r < kCount; ++r)
    for (int j = 0; j < kWide; ++j) {
      float* to = out + r * out_stride + 16 * j;
      store(to, fma(counted(sum[r][j]), splat(steps[r]), load<f32x16>(to)));
    }
}

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

// f(rows done before, Count<4, 3, 2 or 1>)
template <class F>
KV_INLINE void by_rows(int rows, F&& f) {
  int r = 0;
  for (; rows - r >= 4; r += 4) f(r, Count<4>{});
  if (rows - r == 3) f(r, Count<3>{});
  if (rows - r == 2) f(r, Count<2>{});
  if (rows - r == 1) f(r, Count<1>{});
}

// Scores of a whole page. `q`: float32 queries [rows][D]
inline void coded_score(const Layout& l, const uint8_t* page, const float* q, int rows, float scale,
                        const uint8_t* ahead, float* scores, int64_t width) {
  int16_t packed[16 * 256];
  float steps[16];
  for (int r = 0; r < rows; ++r)
    steps[r] = scale * in_16_bits(q + static_cast<int64_t>(r) * l.head_dim, page + l.key_scales, l.head_dim,
                                  packed + r * l.head_dim);
  const int64_t block_bytes = static_cast<int64_t>(l.head_dim) * 16;
  for (int block = 0; block < l.page_size / 16; ++block)
    by_rows(rows, [&](int r, auto count) {
      coded_score_rows<decltype(count)::value>(page + block * block_bytes, packed + r * l.head_dim, l.head_dim,
                                               l.head_dim / 2, (r ? page : ahead) + block * block_bytes, steps + r,
                                               scores + 16 * block + r * width, width);
    });
}

// Mixes a whole page's values. `weights`: float32 [rows], `weight_stride` from row to row
inline void coded_mix(const Layout& l, const uint8_t* page, const float* weights, int64_t weight_stride, int rows,
                      const uint8_t* ahead, float* out, int64_t out_stride) {
  int16_t packed[16 * 32];
  float steps[16];
  for (int r = 0; r < rows; ++r)
    steps[r] = in_16_bits(weights + r * weight_stride, page + l.value_scales, l.page_size, packed + r * l.page_size);
  const uint8_t* values = page + l.values;
  const int64_t stride = 2 * static_cast<int64_t>(l.head_dim);
  by_rows(rows, [&](int r, auto count) {
    const uint8_t* soon = r ? values : ahead;
    int c = 0;
    for (; c + 64 <= l.head_dim; c += 64)
      coded_mix_rows<decltype(count)::value, 4>(values + 2 * c, stride, l.page_size / 2, soon + 2 * c,
                                                packed + r * l.page_size, l.page_size, steps + r,
                                                out + r * out_stride + c, out_stride);
    for (; c < l.head_dim; c += 16)
      coded_mix_rows<decltype(count)::value, 1>(values + 2 * c, stride, l.page_size / 2, soon + 2 * c,
                                                packed + r * l.page_size, l.page_size, steps + r,
                                                out + r * out_stride + c, out_stride);
  });
}

#else
constexpr bool kHasCoded = false;
inline void coded_score(const Layout&, const uint8_t*, const float*, int, float, const uint8_t*, float*, int64_t) {}
inline void coded_mix(const Layout&, const uint8_t*, const float*, int64_t, int, const uint8_t*, float*, int64_t) {}
#endif

}  // namespace kvpager::KV_ISA
