#include "digest.h"

#include "digest_build.h"
#include "digest_pick.h"
#include "digest_plan.h"
#include "threads.h"

namespace kvpager::KV_ISA {

namespace {

constexpr int kRows = 8;  // queries that are looked at together

KV_INLINE void transpose(i32x16 (&rows)[16]) {
  // four rounds of the perfect shuffle: lane i of row j goes to lane j of row i
  for (int round = 0; round < 4; ++round) {
    i32x16 next[16];
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                                            15, 31);
    }
    for (int i = 0; i < 16; ++i) rows[i] = next[i];
  }
}

// Digests are read once a step, long after they left the caches: each page's is asked for while the page a chunk before
// it is worked on.
KV_INLINE void fetch(const DigestChoice& c, size_t page) {
  const size_t dim = static_cast<size_t>(c.shape.head_dim), bytes = c.shape.code_bytes();
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(c.layer.codes + page * bytes + i, 0, 2);
  for (size_t i = 0; i < dim; i += 64) {
    __builtin_prefetch(c.layer.steps + page * dim + i, 0, 2);
    __builtin_prefetch(c.layer.offsets + page * dim + i, 0, 2);
  }
  __builtin_prefetch(c.layer.scales + 2 * page, 0, 2);
}

// One KV head's pages of a chunk. Lanes beyond the last page repeat it.
struct Chunk {
  size_t at[kPages];     // index of the page in the layer's arrays
  size_t next[kPages];   // of the pages that this thread looks at next
  int64_t starts[kPages];
  i32x16 offsets[kMostDim / 4];  // [D/4]: four channels of each page
  f32x16 step_scale, offset_scale;
  bool hidden, capped;

  static void find(const DigestChoice& c, int64_t index, int head, size_t (&found)[kPages]) {
    for (int p = 0; p < kPages; ++p) {
      const int64_t page = index * kPages + p < c.pages ? index * kPages + p : c.pages - 1;
      found[p] = static_cast<size_t>(c.rows[page] * c.shape.heads + head);
    }
  }

  void gather(const DigestChoice& c, int64_t index, int head, int64_t first_seen) {
    const int dim = c.shape.head_dim;
    find(c, index, head, at);
    if (head + 1 < c.shape.heads) find(c, index, head + 1, next);
    else find(c, index + 1, 0, next);
    hidden = false;
    capped = c.softcap > 0;
    for (int p = 0; p < kPages; ++p) {
      const int64_t page = index * kPages + p < c.pages ? index * kPages + p : c.pages - 1;
      starts[p] = c.starts[page];
      hidden |= c.window && starts[p] < first_seen;
      offset_scale[p] = c.layer.scales[2 * at[p]];
      step_scale[p] = c.layer.scales[2 * at[p] + 1];
    }
    for (int d = 0; d < dim; d += 64) {
      const size_t bytes = static_cast<size_t>(dim - d < 64 ? dim - d : 64);
      i32x16 block[16];
      for (int p = 0; p < kPages; ++p) {
        block[p] = i32x16{};
        const int8_t* from = c.layer.offsets + at[p] * dim + d;
        if (bytes == 64) std::memcpy(&block[p], from, 64);
        else std::memcpy(&block[p], from, bytes);
      }
      transpose(block);
      for (size_t i = 0; i < bytes / 4; ++i) offsets[d / 4 + i] = block[i];
    }
  }
};

// Soft cap and window, for the few models that have them: scores [16][P] of one look; returns the largest.
float cap_and_hide(const DigestChoice& c, const Chunk& chunk, float* scores, int64_t first_seen) {
  const int size = c.shape.page_size;
  float peak = kLowest;
  for (int i = 0; i < kPages * size; i += 16) {
    f32x16 x = load<f32x16>(scores + i);
    if (chunk.capped) {
      const float cap = c.softcap * kLog2E;
      f32x16 twice = x * (2 / cap);
      twice = twice > 60 ? splat(60) : twice;
      twice = twice < -60 ? splat(-60) : twice;
      x = cap - 2 * cap / (exp(twice) + 1);
    }
    for (int lane = 0; lane < 16; ++lane) {
      if (c.window && chunk.starts[(i + lane) / size] + (i + lane) % size < first_seen) x[lane] = -__builtin_inff();
      peak = x[lane] > peak ? x[lane] : peak;
    }
    store(scores + i, x);
  }
  return peak;
}

// Exponentials of scores [16][P], summed by page.
template <int P>
KV_INLINE f32x16 page_sums(const float* scores, float peak) {
  f32x16 rows[16];
  if constexpr (P == 8) {
    const f32x16 zero{};
    for (int i = 0; i < 8; ++i) {
      const f32x16 x = exp2_fast(load<f32x16>(scores + 16 * i) - peak);
      rows[2 * i] = __builtin_shufflevector(x, zero, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
      rows[2 * i + 1] = __builtin_shufflevector(x, zero, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
    }
  } else {
    for (int p = 0; p < 16; ++p) {
      rows[p] = exp2_fast(load<f32x16>(scores + P * p) - peak);
      if constexpr (P == 32) rows[p] += exp2_fast(load<f32x16>(scores + P * p + 16) - peak);
    }
  }
  return sums_of(rows);
}

// `Rows` looks of one KV head, from `row`, at one chunk's pages: at their codes, or at what `decode` made of them.
template <int P, bool Decoded, int Rows>
void look(const DigestChoice& c, const Plan& plan, const Chunk& chunk, int head, int64_t index, int64_t row,
          const uint8_t* decoded) {
  constexpr int B = P < 16 ? P : 16;
  constexpr int kChains = Rows <= 4 ? 2 : 1;  // sums in flight: few queries alone would wait for each sum
  constexpr int W = B < kLanes ? B : kLanes;
  typedef typename Lanes<W>::i32 I;
  typedef typename Lanes<W>::u32 U;
  typedef typename Lanes<W>::f32 F;
  const int dim = c.shape.head_dim, groups = dim / 4;
  const int32_t *small[Rows], *fine[Rows];
  alignas(64) float factor[Rows][kPages], shift[Rows][kPages], scores[Rows][kPages * P];
  i32x16 sum[Rows];
  F most[Rows];
  for (int r = 0; r < Rows; ++r) {
    small[r] = plan.small + (head * plan.looks + row + r) * groups * kWeights;
    fine[r] = plan.fine + (head * plan.looks + row + r) * groups * 2;
    sum[r] = i32x16{};
    most[r] = F{} + kLowest;
  }
  for (int g = 0; g < groups; ++g) {
    typedef int16_t i16x32 __attribute__((vector_size(64)));
    const i16x32 bytes = (i16x32)chunk.offsets[g];
    const i32x16 even = (i32x16)((i16x32)(bytes << 8) >> 8), odd = (i32x16)(bytes >> 8);
    for (int r = 0; r < Rows; ++r)
      sum[r] += madd(even, i32x16{} + fine[r][2 * g]) + madd(odd, i32x16{} + fine[r][2 * g + 1]);
  }
  for (int r = 0; r < Rows; ++r) {
    const float* small_scale = plan.small_scale + head * plan.wide + row;
    const float* fine_scale = plan.fine_scale + head * plan.wide + row;
    store(factor[r], chunk.step_scale * small_scale[r]);
    store(shift[r], __builtin_convertvector(sum[r], f32x16) * chunk.offset_scale * fine_scale[r]);
  }
  for (int p = 0; p < kPages; ++p) {
    Tables tables;
    if constexpr (!Decoded) {
      fetch(c, chunk.next[p]);
      tables.fill(c.layer.steps + chunk.at[p] * dim, dim);
    }
    for (int part = 0; part < P / W; ++part) {
      I dots[Rows][kChains];
      for (int r = 0; r < Rows; ++r)
        for (int chain = 0; chain < kChains; ++chain) dots[r][chain] = I{};
      auto add = [&](int group, int turn, U keys) __attribute__((always_inline)) {
        for (int r = 0; r < Rows; ++r)
          dots[r][turn % kChains] = dot(dots[r][turn % kChains], keys, small[r] + kWeights * group);
      };
      if constexpr (Decoded) {
        const uint8_t* keys = decoded + (p * (P / W) + part) * dim * W;
        for (int g = 0; g < groups; g += 2) {
          add(g, 0, load<U>(keys + g * 4 * W));
          add(g + 1, 1, load<U>(keys + (g + 1) * 4 * W));
        }
      } else {
        each_group<B, W>(c.layer.codes + chunk.at[p] * c.shape.code_bytes() + part / (B / W) * (B * dim / 4),
                         part % (B / W), dim, tables, add);
      }
      for (int r = 0; r < Rows; ++r) {
        for (int chain = 1; chain < kChains; ++chain) dots[r][0] += dots[r][chain];
        const F x = __builtin_convertvector(dots[r][0], F) * factor[r][p] + shift[r][p];
        most[r] = x > most[r] ? x : most[r];
        store(scores[r] + p * P + part * W, x);
      }
    }
  }
  const int64_t valid = c.pages - index * kPages;
  float tops[Rows];
  for (int r = 0; r < Rows; ++r) tops[r] = largest(most[r]);
  for (int r = 0; r < Rows; ++r) {
    float peak = tops[r];
    if (chunk.capped || chunk.hidden)
      peak = cap_and_hide(c, chunk, scores[r], plan.first[head * plan.wide + row + r]);
    f32x16 sums = page_sums<P>(scores[r], peak);
    for (int64_t lane = valid; lane < kPages; ++lane) sums[lane] = 0;
    plan.peaks[(head * plan.chunks + index) * plan.wide + row + r] = peak;
    store(plan.sums + ((head * plan.chunks + index) * plan.looks + row + r) * kPages, sums);
  }
}

// The keys of a chunk as whole numbers: [16][P/W][D/4][W][4].
template <int P>
void decode(const DigestChoice& c, const Chunk& chunk, uint8_t* decoded) {
  constexpr int B = P < 16 ? P : 16, W = B < kLanes ? B : kLanes;
  const int dim = c.shape.head_dim;
  for (int p = 0; p < kPages; ++p) {
    fetch(c, chunk.next[p]);
    Tables tables;
    tables.fill(c.layer.steps + chunk.at[p] * dim, dim);
    for (int part = 0; part < P / W; ++part) {
      uint8_t* to = decoded + (p * (P / W) + part) * dim * W;
      each_group<B, W>(c.layer.codes + chunk.at[p] * c.shape.code_bytes() + part / (B / W) * (B * dim / 4),
                       part % (B / W), dim, tables,
                       [&](int group, int, auto keys) __attribute__((always_inline)) { store(to + group * 4 * W, keys); });
    }
  }
}

template <int P, bool Decoded>
void look_by_rows(const DigestChoice& c, const Plan& plan, const Chunk& chunk, int head, int64_t index,
                  const uint8_t* decoded) {
  int64_t row = 0;
  for (; plan.looks - row >= kRows; row += kRows) look<P, Decoded, kRows>(c, plan, chunk, head, index, row, decoded);
  if (plan.looks - row >= 4) {
    look<P, Decoded, 4>(c, plan, chunk, head, index, row, decoded);
    row += 4;
  }
  switch (plan.looks - row) {
    case 3: return look<P, Decoded, 3>(c, plan, chunk, head, index, row, decoded);
    case 2: return look<P, Decoded, 2>(c, plan, chunk, head, index, row, decoded);
    case 1: return look<P, Decoded, 1>(c, plan, chunk, head, index, row, decoded);
    default: return;
  }
}

template <int P>
void look_all(const DigestChoice& c, const Plan& plan, int64_t index, int head) {
  int64_t first_seen = 0;
  for (int64_t r = 0; r < plan.looks; ++r) {
    const int64_t first = plan.first[head * plan.wide + r];
    first_seen = first > first_seen ? first : first_seen;
  }
  Chunk chunk;
  chunk.gather(c, index, head, first_seen);
  if (plan.looks > kRows) {  // the keys are used again and again
    alignas(64) uint8_t decoded[kPages * P * kMostDim];
    decode<P>(c, chunk, decoded);
    look_by_rows<P, true>(c, plan, chunk, head, index, decoded);
  } else {
    look_by_rows<P, false>(c, plan, chunk, head, index, nullptr);
  }
}

// Joins a head's chunks: each look's softmax over all candidates and its own keys, then what the looks make of each page.
void join_chunks(const Plan& plan, int head) {
  float* peaks = plan.peaks + head * plan.chunks * plan.wide;
  const float* sums = plan.sums + head * plan.chunks * plan.looks * kPages;
  const float* own = plan.own + head * plan.wide;
  for (int64_t l = 0; l < plan.wide; l += 16) {
    f32x16 top = max(load<f32x16>(own + l), splat(kLowest));
    for (int64_t i = 0; i < plan.chunks; ++i) top = max(load<f32x16>(peaks + i * plan.wide + l), top);
    for (int64_t i = 0; i < plan.chunks; ++i) {
      float* peak = peaks + i * plan.wide + l;
      store(peak, exp2_fast(load<f32x16>(peak) - top));
    }
    const f32x16 own_share = exp2_fast(load<f32x16>(own + l) - top);
    for (int64_t r = l; r < plan.looks && r < l + 16; ++r) {
      f32x16 partial{};
      for (int64_t i = 0; i < plan.chunks; ++i)
        partial += load<f32x16>(sums + (i * plan.looks + r) * kPages) * peaks[i * plan.wide + r];
      float total = own_share[r - l];
      for (int lane = 0; lane < 16; ++lane) total += partial[lane];
      const float share = total > 0 ? 1 / total : 0;
      for (int64_t i = 0; i < plan.chunks; ++i) peaks[i * plan.wide + r] *= share;
    }
  }
  for (int64_t i = 0; i < plan.chunks; ++i) {
    f32x16 mass{}, squares{};
    for (int64_t r = 0; r < plan.looks; ++r) {
      const f32x16 share = load<f32x16>(sums + (i * plan.looks + r) * kPages) * peaks[i * plan.wide + r];
      mass += share;
      squares += share * share;
    }
    alignas(64) float roots[16];
    store(roots, squares);
    for (float& root : roots) root = __builtin_sqrtf(root);
    squares = load<f32x16>(roots);
    store(plan.mass + (head * plan.chunks + i) * kPages, mass);
    store(plan.wanted + (head * plan.chunks + i) * kPages, squares);
  }
}

constexpr int64_t kSmall = 300;  // pages times queries, about 10 us: less is not worth waking threads for

void choose(DigestChoice& c) {
  const int heads = c.shape.heads;
  const Looks looks{c.tokens, c.sample, c.group};
  const Plan plan(c.shape, c.pages, looks.total(), c.scratch);
  const bool alone = c.pages * heads * (plan.looks + 4) < kSmall * 7;
  auto each = [&](int64_t items, auto&& work) {
    if (!alone) return parallel(items, [&](int64_t item, int thread) { work(item, thread); });
    for (int64_t item = 0; item < items; ++item) work(item, 0);
  };
  for (int64_t i = 0; i < heads * plan.wide; ++i) plan.own[i] = kLowest;
  for (int64_t i = 0; i < heads * plan.chunks * plan.wide; ++i) plan.peaks[i] = kLowest;
  for (int head = 0; head < heads; ++head) prepare(c, plan, head);
  // neighbouring chunks go to the same thread, whose caches then hold what it asked for ahead
  const int64_t run = plan.chunks >= 32 ? 4 : 1;
  each((plan.chunks + run - 1) / run, [&](int64_t item, int) {
    const int64_t end = (item + 1) * run < plan.chunks ? (item + 1) * run : plan.chunks;
    size_t begin[kPages];
    Chunk::find(c, item * run, 0, begin);
    for (size_t page : begin) fetch(c, page);
    for (int64_t index = item * run; index < end; ++index)
      for (int head = 0; head < heads; ++head) {
        switch (c.shape.page_size) {
          case 8: look_all<8>(c, plan, index, head); break;
          case 16: look_all<16>(c, plan, index, head); break;
          default: look_all<32>(c, plan, index, head); break;
        }
      }
  });
  for (int head = 0; head < heads; ++head) join_chunks(plan, head);
  pick(c, plan.wanted, plan.mass, plan.chunks * kPages, plan.candidates, plan.marks, plan.looks);
}

size_t scratch(const DigestShape& shape, int64_t pages, int64_t looks) {
  return Plan(shape, pages, looks, nullptr).bytes;
}

}  // namespace

const DigestTable& digest_table() {
  static constexpr DigestTable table{&build, &choose, &scratch};
  return table;
}

}  // namespace kvpager::KV_ISA
