// Attention of up to 32 rows (queries of one KV head) over a span of its pages: chunk by chunk scores, softmax, mix.
// Scores are in base 2: times log2(e), so that weights are powers of two.
// The softmax over chunks is the online one (Milakov and Gimelshein, arXiv 1805.02867). For kernel sources alone.
#pragma once

#include "attention.h"
#include "attention_blocks.h"
#include "attention_coded.h"
#include "attention_expand.h"

namespace kvpager::KV_ISA {

constexpr int kRows = 32;          // most rows of a span
constexpr int kChunk = 256;        // tokens whose scores are held at once
constexpr int kVectors = kChunk / 16;
constexpr int kMostPages = kChunk / 8;
constexpr int kMostDim = 256;
constexpr int kSpare = 64 * 1024;  // bytes: at least two pages' values of any type
constexpr int kAhead = 4;          // pages
#if defined(__AVX512F__)
constexpr bool kManyRegisters = true;  // for 16 rows of a softmax side by side, and scores of four pages
#else
constexpr bool kManyRegisters = false;
#endif
constexpr int kFewRows = 16;       // for which int8 pages are not worth expanding

// What a span leaves: sums of rows not yet divided by `total`, relative to `top`.
struct SpanResult {
  float* out;    // [rows][width], width is D in whole vectors of 16
  float* top;    // [rows], a score times log2(e)
  float* total;  // [rows]
};

// kExpand: pages are int8 and E is BFloat16. They are multiplied as they are where rows are few, else made bfloat16 first.
template <class E, bool kExpand>
class Span {
 public:
  using M = typename E::M;

  // q: packed queries of these rows, plain: as they came; row0: the first row's number among the head's G * T
  Span(const AttendArgs& args, const M* q, const float* plain, int64_t row0, int rows, const SpanResult& result)
      : a_(args), l_(args.view.layout), q_(q), plain_(plain), row0_(row0), rows_(rows), reach_(args.pages + args.after),
        direct_(kExpand && kHasCoded && rows <= kFewRows && l_.page_size >= 16 && l_.head_dim % 16 == 0), result_(result),
        scale_(args.scale * kLog2e), cap_(args.softcap * kLog2e),
        stride_(static_cast<int64_t>(l_.head_dim) / E::kPair * E::kMult), width_((l_.head_dim + 15) / 16 * 16),
        value_bytes_(static_cast<int64_t>(l_.page_size) * l_.head_dim * E::kItem) {
    for (int r = 0; r < rows; ++r) {
      result.top[r] = -kInf;
      result.total[r] = 0;
    }
    std::memset(result.out, 0, sizeof(float) * static_cast<size_t>(rows) * width_);
  }

  void run(int64_t first, int64_t last) {
    const int per_chunk = kChunk / l_.page_size;
    for (int64_t page = first; page < last; page += per_chunk) {
      const int count = static_cast<int>(last - page < per_chunk ? last - page : per_chunk);
      scores(page, count);
      int r = 0;
      if constexpr (kManyRegisters)
        for (; r + 16 <= rows_; r += 16) softmax_rows(r, page, count);
      for (; r < rows_; ++r) softmax(r, page, count);
      mix_chunk(page, count);
    }
  }

 private:
  const uint8_t* frame(int64_t page) const { return a_.view.frames + a_.frames[page] * l_.page_bytes; }

  // Whether an int8 page is multiplied as it is.
  bool direct(int64_t page) const { return direct_ && !slot(page); }

  // The staging slot of a page that is not full, or null.
  const float* slot(int64_t page) const {
    if (!kExpand || a_.counts[page] == l_.page_size) return nullptr;
    const int32_t slot = a_.view.staged[a_.frames[page]];
    return slot < 0 ? nullptr : a_.view.slot(slot);
  }

  // The tokens of a page that the query at `position` sees.
  void visible(int64_t page, int64_t position, int& low, int& high) const {
    const int64_t start = a_.starts[page];
    int64_t h = position - start + 1 < a_.counts[page] ? position - start + 1 : a_.counts[page];
    int64_t l = a_.window ? position - a_.window + 1 - start : 0;
    h = h < 0 ? 0 : h;
    low = static_cast<int>(l < 0 ? 0 : l > h ? h : l);
    high = static_cast<int>(h);
  }

  bool whole(int64_t page) const {
    const int64_t start = a_.starts[page], last = a_.start + a_.tokens - 1;
    return a_.counts[page] == l_.page_size && start + l_.page_size - 1 <= a_.start &&
           (!a_.window || start > last - a_.window);
  }

  const uint8_t* keys(int64_t page, const uint8_t* next, uint8_t* spare) const {
    if constexpr (kExpand) {
      if (const float* held = slot(page))
        expand_slot_keys(l_, held, reinterpret_cast<uint16_t*>(spare));
      else
        expand_keys(l_, frame(page), next, spare);
      return spare;
    }
    return frame(page);
  }

  // What is wanted soon while half a page is read: first all keys of a chunk are, then all of its values.
  // That goes on into the pages of the next span, which is mostly the same thread's.
  const uint8_t* ahead(int64_t page, int count, int index, bool values, const uint8_t* self) const {
    int64_t next = index + kAhead * 2;
    bool of_values = values;
    if (next >= count) {
      next -= count;
      if (values) next += count;
      of_values = !values;
    }
    const int64_t target = page + next;
    if (next < 0 || target >= reach_ || (of_values && next >= count)) return self;
    return frame(target) + (of_values ? l_.values : 0);
  }

  // The scales of a page are wanted with its keys, and once more with its values, a chunk later at most.
  void fetch_scales(int64_t page) const {
    if (!kExpand || page >= reach_) return;
    const uint8_t* at = frame(page);
    for (size_t i = l_.key_scales; i < l_.page_bytes; i += 64) prefetch(at + i);
  }

  void scores(int64_t page, int count) {
    const int steps = l_.head_dim / E::kPair;
    const int64_t block_bytes = static_cast<int64_t>(steps) * l_.block * E::kPair * E::kItem;
    if (l_.page_size == 8) {
      for (int i = 0; i < count; i += 2) {
        const int second = i + 1 < count ? i + 1 : i;
        const uint8_t* next = ahead(page, count, i, false, frame(page + i));
        const uint8_t* k = keys(page + i, next, spare_);
        const uint8_t* k2 = keys(page + second, next, spare_ + kSpare / 2);
        score<E, true>(k, k2, q_, stride_, rows_, steps, kExpand ? k : next, scale_, scores_ + 8 * i, kChunk);
        finish(page + i, 8 * i, second == i ? -1 : page + second);
      }
      return;
    }
    int i = 0;
    if constexpr (kManyRegisters && !kExpand) {
      const int blocks = l_.page_size / 16, pages = kBlocks / blocks;
      for (; i + pages <= count; i += pages) {
        const uint8_t *k[kBlocks], *next[kBlocks];
        for (int b = 0; b < kBlocks; ++b) {
          const int at = i + b / blocks;
          const int64_t offset = b % blocks * block_bytes;
          k[b] = frame(page + at) + offset;
          next[b] = ahead(page, count, at, false, frame(page + at)) + offset;
        }
        score_blocks<E>(k, next, q_, stride_, rows_, steps, scale_, scores_ + i * l_.page_size, kChunk);
        for (int b = 0; b < kBlocks; ++b) finish(page + i + b / blocks, i * l_.page_size + 16 * b, -2, b % blocks * 16);
      }
    }
    for (; i < count; ++i) {
      const uint8_t* next = ahead(page, count, i, false, frame(page + i));
      fetch_scales(page + i + 2 * kAhead);
      if (direct(page + i)) {
        coded_score(l_, frame(page + i), plain_, rows_, scale_, next, scores_ + i * l_.page_size, kChunk);
        for (int at = 0; at < l_.page_size; at += 16) finish(page + i, i * l_.page_size + at, -2, at);
        continue;
      }
      const uint8_t* k = keys(page + i, next, spare_);
      for (int block = 0; block < l_.page_size / 16; ++block) {
        const int at = i * l_.page_size + 16 * block;
        score<E, false>(k + block * block_bytes, nullptr, q_, stride_, rows_, steps,
                        (kExpand ? k : next) + block * block_bytes, scale_, scores_ + at, kChunk);
        finish(page + i, at, -2, 16 * block);
      }
    }
  }

  // Soft-capping, and -inf for what is hidden, in one vector of scores of all rows. Its tokens: from `offset` on of
  // `page`; where second is not -2, 8 of `page` and 8 of `second` (-1: none).
  void finish(int64_t page, int at, int64_t second, int offset = 0) {
    if (cap_ > 0)
      for (int r = 0; r < rows_; ++r) {
        float* s = scores_ + r * kChunk + at;
        store(s, tanh(load<f32x16>(s) / cap_) * cap_);
      }
    if (whole(page) && (second == -2 || (second >= 0 && whole(second)))) return;
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int r = 0; r < rows_; ++r) {
      const int64_t position = a_.start + (row0_ + r) % a_.tokens;
      int low, high;
      visible(page, position, low, high);
      i32x16 seen = (lane + offset >= low) & (lane + offset < high);
      if (second != -2) {
        int low2 = 0, high2 = 0;
        if (second >= 0) visible(second, position, low2, high2);
        const i32x16 seen2 = (lane - 8 >= low2) & (lane - 8 < high2);
        seen = lane < 8 ? seen : seen2;
      }
      float* s = scores_ + r * kChunk + at;
      store(s, seen ? load<f32x16>(s) : splat(-kInf));
    }
  }

  void softmax(int r, int64_t page, int count) {
    float* s = scores_ + r * kChunk;
    const int vectors = (count * l_.page_size + 15) / 16;
    f32x16 most = load<f32x16>(s);
    for (int i = 1; i < vectors; ++i) most = max(most, load<f32x16>(s + 16 * i));
    const float before = result_.top[r], here = top_of(most);
    const float top = before > here ? before : here;
    const float safe = top == -kInf ? 0 : top;
    f32x16 weights[kVectors] = {};
    for (int i = 0; i < vectors; ++i) {
      weights[i] = exp2(load<f32x16>(s + 16 * i) - safe);
      if constexpr (kExpand) store(s + 16 * i, weights[i]);
      E::pack(weights_ + r * kWeights + i * (16 / E::kPair * E::kMult), weights[i]);
    }
    result_.top[r] = top;
    if (top != before) {
      const f32x16 factor = exp2(splat(before - safe));
      result_.total[r] *= factor[0];
      float* out = result_.out + r * width_;
      for (int c = 0; c < width_; c += 16) store(out + c, load<f32x16>(out + c) * factor);
    }
    result_.total[r] += a_.page_lse ? masses(r, page, count, weights, safe) : sum_of(weights, vectors);
  }

  // As above for 16 rows from `first` on, which are the lanes of sums and tops.
  void softmax_rows(int first, int64_t page, int count) {
    float* s = scores_ + first * kChunk;
    const int vectors = (count * l_.page_size + 15) / 16;
    f32x16 w[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) w[r] = load<f32x16>(s + r * kChunk);
    for (int i = 1; i < vectors; ++i)
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) w[r] = max(w[r], load<f32x16>(s + r * kChunk + 16 * i));
    const f32x16 before = load<f32x16>(result_.top + first), here = maxes(w);
    const f32x16 top = before > here ? before : here;
    const f32x16 safe = top == -kInf ? f32x16{} : top;
    alignas(64) float tops[16], factors[16];
    store(tops, safe);
    store(result_.top + first, top);
    const f32x16 factor = exp2(before - safe);
    f32x16 total = load<f32x16>(result_.total + first) * factor;
    store(factors, factor);
    for (int r = 0; r < 16; ++r) {
      if (factors[r] == 1.0f) continue;
      float* out = result_.out + (first + r) * width_;
      for (int c = 0; c < width_; c += 16) store(out + c, load<f32x16>(out + c) * factors[r]);
    }
    M* weights = weights_ + first * kWeights;
    f32x16 sum = {};
    for (int i = 0; i < vectors; ++i, s += 16, weights += 16 / E::kPair * E::kMult) {
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        w[r] = exp2(load<f32x16>(s + r * kChunk) - tops[r]);
        if constexpr (kExpand) store(s + r * kChunk, w[r]);
        E::pack(weights + r * kWeights, w[r]);
      }
      if (l_.page_size == 8) {  // page 2 i, and page 2 i + 1
        const f32x16 a = half_sums(w), b = half_sums(w + 8);
        const f32x16 even = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        const f32x16 odd = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        total += even + odd;
        put(first, page + 2 * i, even, safe);
        if (2 * i + 1 < count) put(first, page + 2 * i + 1, odd, safe);
        continue;
      }
      const f32x16 part = sums(w);
      total += part;
      sum = l_.page_size == 32 && i % 2 ? sum + part : part;
      if (l_.page_size == 16 || i % 2) put(first, page + i * 16 / l_.page_size, sum, safe);
    }
    store(result_.total + first, total);
  }

  // Log-sum-exp from sums of weights relative to the top scores.
  static f32x16 page_lse(f32x16 sums, f32x16 top) { return log(sums) + top * kLn2; }

  // Writes a page's log-sum-exp for 16 rows.
  void put(int first, int64_t page, f32x16 sums, f32x16 top) {
    if (!a_.page_lse) return;
    const f32x16 found = page_lse(sums, top);
    if (a_.tokens > 1) {
      store(a_.page_lse + page * a_.group * a_.tokens + row0_ + first, found);
      return;
    }
    alignas(64) float lanes[16];
    store(lanes, found);
    for (int r = 0; r < 16; ++r) a_.page_lse[(row0_ + first + r) * a_.pages + page] = lanes[r];
  }

  // Writes the pages' log-sum-exp; returns the sum of all weights.
  float masses(int r, int64_t page, int count, const f32x16* weights, float safe) {
    alignas(64) float found[kMostPages];
    const float total = page_sums(weights, l_.page_size, found);
    for (int i = 0; i < count; i += 16) store(found + i, page_lse(load<f32x16>(found + i), splat(safe)));
    if (a_.tokens == 1) {
      std::memcpy(a_.page_lse + (row0_ + r) * a_.pages + page, found, static_cast<size_t>(count) * sizeof(float));
      return total;
    }
    const int64_t rows = a_.group * a_.tokens;
    float* to = a_.page_lse + page * rows + row0_ + r;
    for (int i = 0; i < count; ++i) to[i * rows] = found[i];
    return total;
  }

  // A page's values with zeros for tokens that no query sees: zero weight times a stray NaN would be NaN.
  const uint8_t* values(int64_t page, const uint8_t* next, uint8_t* spare) const {
    const uint8_t* from = frame(page) + l_.values;
    if constexpr (kExpand) {
      if (const float* held = slot(page))
        expand_slot_values(l_, held + static_cast<int64_t>(l_.page_size) * l_.head_dim,
                           reinterpret_cast<uint16_t*>(spare));
      else
        expand_values(l_, frame(page), next, spare);
    } else {
      std::memcpy(spare, from, static_cast<size_t>(value_bytes_));
    }
    int low, high, low2, high2;
    visible(page, a_.start, low, high2);
    visible(page, a_.start + a_.tokens - 1, low2, high);
    for (int t = 0; t < l_.page_size; ++t) {
      if (t >= low && t < high) continue;
      uint8_t* at = spare + (static_cast<int64_t>(t / E::kPair) * l_.head_dim * E::kPair + t % E::kPair) * E::kItem;
      for (int c = 0; c < l_.head_dim; ++c) std::memset(at + c * E::kPair * E::kItem, 0, E::kItem);
    }
    return spare;
  }

  void mix_chunk(int64_t page, int count) {
    const uint8_t* found[kMostPages];
    const uint8_t* next[kMostPages];
    Run run{found, next, 0, l_.page_size / E::kPair, static_cast<int64_t>(l_.head_dim) * E::kPair * E::kItem};
    const int page_weights = l_.page_size / E::kPair * E::kMult;
    int begin = 0;
    uint8_t* spare = spare_;
    const auto flush = [&](int next_begin) {
      if (run.pages) mix<E>(run, l_.head_dim, weights_ + begin * page_weights, kWeights, rows_, result_.out, width_);
      begin = next_begin;
      run.pages = 0;
      spare = spare_;
    };
    for (int i = 0; i < count; ++i) {
      const uint8_t* v = frame(page + i) + l_.values;
      const uint8_t* soon = ahead(page, count, i, true, v);
      if (direct(page + i)) {
        flush(i + 1);
        coded_mix(l_, frame(page + i), scores_ + i * l_.page_size, kChunk, rows_, soon, result_.out, width_);
        continue;
      }
      if (kExpand || !whole(page + i)) {
        v = values(page + i, soon, spare);
        spare += value_bytes_;
      }
      found[run.pages] = v;
      next[run.pages++] = kExpand ? v : soon;
      if (spare + value_bytes_ > spare_ + kSpare) flush(i + 1);
    }
    flush(count);
  }

  static constexpr int kWeights = kChunk / E::kPair * E::kMult;

  const AttendArgs& a_;
  const Layout& l_;
  const M* q_;
  const float* plain_;
  const int64_t row0_;
  const int rows_;
  const int64_t reach_;  // pages that may be fetched
  const bool direct_;
  const SpanResult result_;
  const float scale_, cap_;
  const int64_t stride_, width_, value_bytes_;
  alignas(64) float scores_[kRows * kChunk];
  alignas(64) M weights_[kRows * kWeights];
  alignas(64) uint8_t spare_[kSpare];
};

}  // namespace kvpager::KV_ISA
