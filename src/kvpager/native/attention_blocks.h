// The inner loops of attention: blocks of rows (queries) held in registers while keys or values stream by. For kernel
// sources alone.
#pragma once

#include "attention_elements.h"

namespace kvpager::KV_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSumRegisters = 16;  // of 32
#else
constexpr int kSumRegisters = 8;  // of 16
#endif
constexpr int kScoreRows = kSumRegisters / kParts;
constexpr int kMixRows = kParts == 1 ? 4 : 2, kMixVectors = kScoreRows / kMixRows;
constexpr int kBlockRows = 4, kBlocks = 4;  // for 32 registers alone: with 16, half as wide, it took half as long again

KV_INLINE void prefetch(const uint8_t* at) { __builtin_prefetch(at, 0, 2); }

// Products of `rows` queries with 16 keys. q: multipliers, `stride` from row to row. kTwo: keys of 8 tokens at `k` and
// 8 more at `k2` (pages of 8); else 16 at `k`. `ahead` is as long as the keys, and wanted soon. Writes
// scores[r * width .. + 16] = product * by.
template <class E, int kRows, bool kTwo>
void score_rows(const uint8_t* k, const uint8_t* k2, const typename E::M* q, int64_t stride, int steps,
                const uint8_t* ahead, float by, float* scores, int64_t width) {
  // several sums a row where there are few rows: one instruction must wait some cycles for the one before it
  constexpr int kSplit = kRows * kParts == 1 ? 4 : kRows * kParts <= 4 ? 2 : 1;
  constexpr int kStep = 16 * E::kPair * E::kItem / (kTwo ? 2 : 1);
  Sums sum[kRows][kSplit] = {};
  for (int i = 0; i < steps; i += kSplit) {
    for (int s = 0; s < kSplit; ++s) {
      const int64_t at = static_cast<int64_t>(i + s) * kStep;
      typename E::Operand x;
      if constexpr (kTwo)
        x = E::read(k + at, k2 + at);
      else
        x = E::read(k + at);
      prefetch(ahead + at);
      for (int r = 0; r < kRows; ++r) E::dot(sum[r][s], x, q + r * stride + (i + s) * E::kMult);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int s = 1; s < kSplit; ++s) add(sum[r][0], sum[r][s]);
    scale(sum[r][0], by);
    store_sums(scores + r * width, sum[r][0]);
  }
}

// Products of `rows` queries with 16 keys at each of kBlocks places, as above, into neighbouring vectors of scores: a
// multiplier that was read serves all places.
template <class E, int kRows, bool kFetch>
void score_blocks_rows(const uint8_t* const* keys, const uint8_t* const* ahead, const typename E::M* q, int64_t stride,
                       int steps, float by, float* scores, int64_t width) {
  constexpr int kSplit = kRows == 1 ? 2 : 1;
  constexpr int kStep = 16 * E::kPair * E::kItem;
  Sums sum[kRows][kBlocks][kSplit] = {};
  for (int i = 0; i < steps; i += kSplit)
    for (int s = 0; s < kSplit; ++s) {
      const int64_t at = static_cast<int64_t>(i + s) * kStep;
      for (int b = 0; b < kBlocks; ++b) {
        const typename E::Operand x = E::read(keys[b] + at);
        if constexpr (kFetch) prefetch(ahead[b] + at);
        for (int r = 0; r < kRows; ++r) E::dot(sum[r][b][s], x, q + r * stride + (i + s) * E::kMult);
      }
    }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) {
      for (int s = 1; s < kSplit; ++s) add(sum[r][b][0], sum[r][b][s]);
      scale(sum[r][b][0], by);
      store_sums(scores + r * width + 16 * b, sum[r][b][0]);
    }
}

template <class E, bool kFetch>
int score_some_blocks(const uint8_t* const* keys, const uint8_t* const* ahead, const typename E::M* q, int64_t stride,
                      int rows, int steps, float scale, float* scores, int64_t width) {
  if (rows >= kBlockRows) {
    score_blocks_rows<E, kBlockRows, kFetch>(keys, ahead, q, stride, steps, scale, scores, width);
    return kBlockRows;
  }
  if (rows == 3) {
    score_blocks_rows<E, 3, kFetch>(keys, ahead, q, stride, steps, scale, scores, width);
    return 3;
  }
  if (rows == 2) {
    score_blocks_rows<E, 2, kFetch>(keys, ahead, q, stride, steps, scale, scores, width);
    return 2;
  }
  score_blocks_rows<E, 1, kFetch>(keys, ahead, q, stride, steps, scale, scores, width);
  return 1;
}

template <class E>
void score_blocks(const uint8_t* const* keys, const uint8_t* const* ahead, const typename E::M* q, int64_t stride,
                  int rows, int steps, float scale, float* scores, int64_t width) {
  int done = score_some_blocks<E, true>(keys, ahead, q, stride, rows, steps, scale, scores, width);
  while (done < rows)
    done += score_some_blocks<E, false>(keys, ahead, q + done * stride, stride, rows - done, steps, scale,
                                        scores + done * width, width);
}

// The most rows at a time that fit: kRows, or half as many, and so on; of a few rows all.
template <class E, bool kTwo, int kRows>
int score_some(const uint8_t* k, const uint8_t* k2, const typename E::M* q, int64_t stride, int rows, int steps,
               const uint8_t* ahead, float scale, float* scores, int64_t width) {
  if (rows >= kRows) {
    score_rows<E, kRows, kTwo>(k, k2, q, stride, steps, ahead, scale, scores, width);
    return kRows;
  }
  if constexpr (kRows > 1)
    return score_some<E, kTwo, kRows == 4 ? 3 : kRows == 3 ? 2 : kRows / 2>(k, k2, q, stride, rows, steps, ahead, scale,
                                                                            scores, width);
  return 0;
}

template <class E, bool kTwo>
void score(const uint8_t* k, const uint8_t* k2, const typename E::M* q, int64_t stride, int rows, int steps,
           const uint8_t* ahead, float scale, float* scores, int64_t width) {
  while (rows > 0) {
    const int done = score_some<E, kTwo, kScoreRows>(k, k2, q, stride, rows, steps, ahead, scale, scores, width);
    rows -= done;
    q += done * stride;
    scores += done * width;
    ahead = k;  // once is enough
  }
}

// A run of pages whose values are mixed: where they lie, and what is wanted soon (each as long as the values).
struct Run {
  const uint8_t* const* values;
  const uint8_t* const* ahead;
  int pages;
  int steps;       // of each page: P / kPair
  int64_t stride;  // bytes from step to step
};

// sum[r][j] += weights[r] . values of kPages pages from `page` on, step by step through all of them: lines of several
// pages in turns come faster from memory than page after page.
template <class E, int kRows, int kVectors, bool kHalf, bool kFetch, int kPages>
KV_INLINE void mix_pages(const Run& run, int page, int64_t offset, const typename E::M* weights, int64_t weight_stride,
                         Sums (&sum)[kRows][kVectors]) {
  constexpr int kStep = 16 * E::kPair * E::kItem;
  const int page_weights = run.steps * E::kMult;
  const typename E::M* w = weights + page * page_weights;
  const uint8_t *values[kPages], *ahead[kPages];
  for (int b = 0; b < kPages; ++b) {
    values[b] = run.values[page + b] + offset;
    ahead[b] = run.ahead[page + b] + offset;
  }
  int64_t at = 0;
  for (int step = 0; step < run.steps; ++step, at += run.stride, w += E::kMult)
    for (int b = 0; b < kPages; ++b)
      for (int j = 0; j < kVectors; ++j) {
        typename E::Operand x;
        if constexpr (kHalf)
          x = E::read(values[b] + at, nullptr);
        else
          x = E::read(values[b] + at + j * kStep);
        if constexpr (kFetch) prefetch(ahead[b] + at + j * kStep);
        for (int r = 0; r < kRows; ++r) E::dot(sum[r][j], x, w + b * page_weights + r * weight_stride);
      }
}

// out[r][16 * kVectors] += weights[r] . values. `weights`: multipliers, `weight_stride` from row to row.
// kHalf: only 8 channels are there, and the upper half of the one vector gets nothing.
template <class E, int kRows, int kVectors, bool kHalf, bool kFetch>
void mix_rows(const Run& run, int64_t offset, const typename E::M* weights, int64_t weight_stride,
              float* out, int64_t out_stride) {
  Sums sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) sum[r][j] = load_sums(out + r * out_stride + 16 * j);
  int page = 0;
  for (; page + kBlocks <= run.pages; page += kBlocks)
    mix_pages<E, kRows, kVectors, kHalf, kFetch, kBlocks>(run, page, offset, weights, weight_stride, sum);
  for (; page < run.pages; ++page)
    mix_pages<E, kRows, kVectors, kHalf, kFetch, 1>(run, page, offset, weights, weight_stride, sum);
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) store_sums(out + r * out_stride + 16 * j, sum[r][j]);
}

template <class E, int kVectors, bool kHalf, bool kFetch>
int mix_some(const Run& run, int64_t offset, const typename E::M* weights, int64_t weight_stride, int rows, float* out,
             int64_t out_stride) {
  if (rows >= kMixRows) {
    mix_rows<E, kMixRows, kVectors, kHalf, kFetch>(run, offset, weights, weight_stride, out, out_stride);
    return kMixRows;
  }
  if (kMixRows > 3 && rows == 3) {
    mix_rows<E, (kMixRows > 3 ? 3 : 1), kVectors, kHalf, kFetch>(run, offset, weights, weight_stride, out, out_stride);
    return 3;
  }
  if (kMixRows > 2 && rows == 2) {
    mix_rows<E, (kMixRows > 2 ? 2 : 1), kVectors, kHalf, kFetch>(run, offset, weights, weight_stride, out, out_stride);
    return 2;
  }
  mix_rows<E, 1, kVectors, kHalf, kFetch>(run, offset, weights, weight_stride, out, out_stride);
  return 1;
}

// What is wanted soon is fetched once, with the first rows.
template <class E, int kVectors, bool kHalf>
void mix_columns(const Run& run, int64_t offset, const typename E::M* weights, int64_t weight_stride, int rows,
                 float* out, int64_t out_stride) {
  int done = mix_some<E, kVectors, kHalf, true>(run, offset, weights, weight_stride, rows, out, out_stride);
  while (done < rows)
    done += mix_some<E, kVectors, kHalf, false>(run, offset, weights + done * weight_stride, weight_stride, rows - done,
                                                out + done * out_stride, out_stride);
}

// out[r][D] += weights[r] . values, for all channels.
template <class E>
void mix(const Run& run, int dim, const typename E::M* weights, int64_t weight_stride, int rows, float* out,
         int64_t out_stride) {
  constexpr int64_t kBytes = E::kPair * E::kItem;
  int c = 0;
  for (; c + 16 * kMixVectors <= dim; c += 16 * kMixVectors)
    mix_columns<E, kMixVectors, false>(run, c * kBytes, weights, weight_stride, rows, out + c, out_stride);
  for (; c + 16 <= dim; c += 16)
    mix_columns<E, 1, false>(run, c * kBytes, weights, weight_stride, rows, out + c, out_stride);
  if (c < dim) mix_columns<E, 1, true>(run, c * kBytes, weights, weight_stride, rows, out + c, out_stride);
}

}  // namespace kvpager::KV_ISA
