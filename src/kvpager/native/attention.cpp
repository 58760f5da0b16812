// Attention of a tile over scattered pages: cut into units that depend on shapes alone, then joined in fixed order.
#include "attention.h"

#include "attention_span.h"
#include "threads.h"

namespace kvpager::KV_ISA {

bool settle(const SettleArgs& args);

namespace {

constexpr int64_t kSmall = 400000;  // units of work, about bytes read, below which waking other threads costs more

struct Unit {
  int64_t head, row0, first, last;
  int64_t part;  // where its partial result lies, or -1: it is the head's only one
  int rows;
};

struct Pieces {
  int64_t row_blocks, pages;  // blocks of rows a head; pages of a unit
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// From shapes alone: few rows are cut by pages, many by rows.
Pieces pieces(const AttendArgs& a) {
  const int64_t rows = a.group * a.tokens, blocks = ceil_div(rows, kRows);
  const int64_t chunk = kChunk / a.view.layout.page_size;
  if (blocks * a.kv_heads >= 8 && rows > 16) return {blocks, a.pages};
  const int64_t wanted = ceil_div(a.pages, 64);
  const int64_t chunks = ceil_div(wanted, chunk);
  return {blocks, chunk * (chunks < 1 ? 1 : chunks > 16 ? 16 : chunks)};
}

struct Scratch {
  uint8_t* memory;
  Unit* units;
  uint8_t* queries;
  float* parts;

  static int64_t whole(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  Scratch(int64_t units_bytes, int64_t query_bytes, int64_t part_bytes) {
    memory = static_cast<uint8_t*>(__builtin_malloc(
        static_cast<size_t>(whole(units_bytes) + whole(query_bytes) + whole(part_bytes) + 64)));
    if (!memory) return;
    uint8_t* at = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64);
    units = reinterpret_cast<Unit*>(at);
    queries = at + whole(units_bytes);
    parts = reinterpret_cast<float*>(queries + whole(query_bytes));
  }
  ~Scratch() { __builtin_free(memory); }
  Scratch(const Scratch&) = delete;
};

template <class F>
void each(int64_t count, bool wide, F&& f) {
  if (wide)
    parallel(count, [&f](int64_t i, int thread) { f(i, thread); });
  else
    for (int64_t i = 0; i < count; ++i) f(i, 0);
}

// Divide a row's sum by its weights' sum; returns its log-sum-exp. `top` is in base 2.
float finish_row(const float* out, float top, float total, int dim, float* to) {
  const f32x16 factor = splat(total > 0 ? 1.0f / total : 0.0f);
  int c = 0;
  for (; c + 16 <= dim; c += 16) store(to + c, load<f32x16>(out + c) * factor);
  for (; c < dim; ++c) to[c] = out[c] * factor[0];
  return total > 0 ? top * kLn2 + log(splat(total))[0] : -kInf;
}

template <class E, bool kExpand>
class Attention {
 public:
  explicit Attention(const AttendArgs& args)
      : a_(args), dim_(args.view.layout.head_dim), width_((dim_ + 15) / 16 * 16), rows_(a_.group * a_.tokens),
        stride_(static_cast<int64_t>(dim_) / E::kPair * E::kMult), pieces_(pieces(args)) {}

  bool run() {
    const int64_t most_units = pieces_.row_blocks * (a_.kv_heads + ceil_div(a_.pages, pieces_.pages));
    const int64_t part_floats = width_ + 16;  // of a row: the sum, the top and the total
    const int64_t query_bytes = a_.kv_heads * rows_ * stride_ * static_cast<int64_t>(sizeof(M));
    Scratch scratch(most_units * static_cast<int64_t>(sizeof(Unit)), query_bytes,
                    most_units * kRows * part_floats * static_cast<int64_t>(sizeof(float)));
    if (!scratch.memory) return false;
    units_ = scratch.units;
    queries_ = reinterpret_cast<M*>(scratch.queries);
    parts_ = scratch.parts;
    plan();
    const int64_t work = a_.pages * (static_cast<int64_t>(a_.view.layout.page_bytes) +
                                     rows_ * a_.view.layout.page_size * dim_ / 8);
    const bool wide = work > kSmall;
    pack_queries();
    // Units by pages go to a thread several together: what one fetches ahead is the next one's.
    const int64_t workers = threads() > 1 ? threads() : 1, fair = count_ / (2 * workers);
    const int64_t run = pieces_.pages < a_.pages && fair > 1 ? fair : 1;
    each(ceil_div(count_, run), wide, [this, run](int64_t first, int) {
      for (int64_t i = first * run; i < count_ && i < (first + 1) * run; ++i) unit(units_[i]);
    });
    join();
    return true;
  }

 private:
  using M = typename E::M;

  void pack_queries() {
    const int64_t rows = a_.kv_heads * rows_;
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = a_.queries + r * dim_;
      M* to = queries_ + r * stride_;
      int c = 0;
      for (; c + 16 <= dim_; c += 16) E::pack(to + c / E::kPair * E::kMult, load<f32x16>(from + c));
      if (c < dim_) {
        M last[16 / E::kPair * E::kMult];
        E::pack(last, joined(load<f32x8>(from + c), f32x8{}));
        std::memcpy(to + c / E::kPair * E::kMult, last, sizeof last / 2);
      }
    }
  }

  void plan() {
    int64_t page = 0, parts = 0;
    count_ = 0;
    for (int64_t head = 0; head < a_.kv_heads; ++head) {
      const int64_t begin = page;
      while (page < a_.pages && a_.heads[page] == head) ++page;
      const int64_t splits = ceil_div(page - begin, pieces_.pages);
      if (splits == 0) nothing(head);
      for (int64_t split = 0; split < splits; ++split)
        for (int64_t row = 0; row < rows_; row += kRows) {
          const int64_t first = begin + split * pieces_.pages;
          const int64_t last = first + pieces_.pages < page ? first + pieces_.pages : page;
          const int rows = static_cast<int>(rows_ - row < kRows ? rows_ - row : kRows);
          units_[count_++] = {head, row, first, last, splits > 1 ? parts++ : -1, rows};
        }
    }
  }

  void nothing(int64_t head) {
    const int64_t row = head * rows_;
    std::memset(a_.output + row * dim_, 0, static_cast<size_t>(rows_ * dim_) * sizeof(float));
    for (int64_t r = 0; r < rows_; ++r) a_.lse[row + r] = -kInf;
  }

  SpanResult part(int64_t index) const {
    float* at = parts_ + index * kRows * (width_ + 16);
    return {at, at + kRows * width_, at + kRows * width_ + kRows};
  }

  void unit(const Unit& u) {
    alignas(64) float own[kRows * (kMostDim + 2)];
    const SpanResult result =
        u.part >= 0 ? part(u.part) : SpanResult{own, own + kRows * kMostDim, own + kRows * (kMostDim + 1)};
    const int64_t row = u.head * rows_ + u.row0;
    Span<E, kExpand> span(a_, queries_ + row * stride_, a_.queries + row * dim_, u.row0, u.rows, result);
    span.run(u.first, u.last);
    if (u.part >= 0) return;
    for (int r = 0; r < u.rows; ++r)
      a_.lse[row + r] = finish_row(result.out + r * width_, result.top[r], result.total[r], dim_,
                                   a_.output + (row + r) * dim_);
  }

  // Units of one head and block of rows, in the order of their pages.
  void join() {
    for (int64_t i = 0; i < count_;) {
      const int64_t head = units_[i].head;
      int64_t end = i;
      while (end < count_ && units_[end].head == head) ++end;
      if (units_[i].part >= 0)
        for (int64_t block = 0; block < pieces_.row_blocks; ++block) join_block(i + block, end);
      i = end;
    }
  }

  void join_block(int64_t first, int64_t end) {
    const Unit& u = units_[first];
    const int64_t step = pieces_.row_blocks;
    for (int r = 0; r < u.rows; ++r) {
      float top = -kInf, total = 0;
      for (int64_t i = first; i < end; i += step) {
        const float here = part(units_[i].part).top[r];
        top = here > top ? here : top;
      }
      const float safe = top == -kInf ? 0 : top;
      const SpanResult sum = part(u.part);
      float* out = sum.out + r * width_;
      for (int64_t i = first; i < end; i += step) {
        const SpanResult other = part(units_[i].part);
        const f32x16 factor = exp2(splat(other.top[r] - safe));
        const float* from = other.out + r * width_;
        for (int64_t c = 0; c < width_; c += 16) {
          const f32x16 scaled = load<f32x16>(from + c) * factor;
          store(out + c, i == first ? scaled : load<f32x16>(out + c) + scaled);
        }
        total += other.total[r] * factor[0];
      }
      const int64_t row = u.head * rows_ + u.row0 + r;
      a_.lse[row] = finish_row(out, top, total, dim_, a_.output + row * dim_);
    }
  }

  const AttendArgs& a_;
  const int dim_;
  const int64_t width_, rows_, stride_;
  const Pieces pieces_;
  Unit* units_ = nullptr;
  M* queries_ = nullptr;
  float* parts_ = nullptr;
  int64_t count_ = 0;
};

bool attend(const AttendArgs& args) {
  switch (args.view.layout.dtype) {
    case DType::float32: return Attention<Float32, false>(args).run();
    case DType::float16: return Attention<Float16, false>(args).run();
    case DType::bfloat16: return Attention<BFloat16, false>(args).run();
    default: return Attention<BFloat16, true>(args).run();
  }
}

constexpr AttentionTable kTable{attend, settle};

}  // namespace

const AttentionTable& attention_table() { return kTable; }

}  // namespace kvpager::KV_ISA
