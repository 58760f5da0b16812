// Groups of pages joined by their log-sum-exp, and what each page got of the attention.
#include "attention.h"
#include "attention_vec.h"
#include "threads.h"

namespace kvpager::KV_ISA {

namespace {

constexpr int64_t kWindow = 32;      // queries of SnapKV's observation window: ports.WINDOW
constexpr int64_t kTogether = 256;   // pages whose masses one thread computes
constexpr int64_t kSmall = 1 << 16;  // numbers, below which waking other threads costs more

class Settle {
 public:
  Settle(const SettleArgs& args, float* lse) : a_(args), rows_(args.group * args.tokens), lse_(lse) {}

  void run() {
    const int64_t heads_rows = a_.kv_heads * rows_;
    if (a_.count > 1)
      each(heads_rows, heads_rows * a_.dim * a_.count, 8, [this](int64_t row) { join(row); });
    else
      std::memcpy(lse_, a_.parts[0].lse, static_cast<size_t>(heads_rows) * sizeof(float));
    if (a_.tokens > 1) {
      each(a_.pages, a_.pages * rows_ * 4, 8, [this](int64_t page) { mass(page); });
      return;
    }
    each((a_.pages + kTogether - 1) / kTogether, a_.pages * rows_ * 4, 1, [this](int64_t i) {
      const int64_t first = i * kTogether, left = a_.pages - first;
      masses_of_one(first, first + (left < kTogether ? left : kTogether));
    });
  }

 private:
  template <class F>
  void each(int64_t items, int64_t work, int64_t batch, F&& f) {
    if (work < kSmall) {
      for (int64_t i = 0; i < items; ++i) f(i);
      return;
    }
    parallel((items + batch - 1) / batch, [&](int64_t b, int) {
      for (int64_t i = b * batch; i < items && i < (b + 1) * batch; ++i) f(i);
    });
  }

  void join(int64_t row) {
    float top = -kInf;
    for (int64_t p = 0; p < a_.count; ++p) top = a_.parts[p].lse[row] > top ? a_.parts[p].lse[row] : top;
    const float safe = top == -kInf ? 0 : top;
    float total = 0;
    for (int64_t p = 0; p < a_.count; ++p) total += exp(splat(a_.parts[p].lse[row] - safe))[0];
    lse_[row] = total > 0 ? safe + log(splat(total))[0] : -kInf;
    const float over = total > 0 ? 1.0f / total : 0.0f;
    float* to = a_.output + row * a_.dim;
    for (int64_t p = 0; p < a_.count; ++p) {
      const f32x16 factor = exp(splat(a_.parts[p].lse[row] - safe)) * over;
      const float* from = a_.parts[p].output + row * a_.dim;
      int64_t c = 0;
      for (; c + 16 <= a_.dim; c += 16) {
        const f32x16 scaled = load<f32x16>(from + c) * factor;
        store(to + c, p ? load<f32x16>(to + c) + scaled : scaled);
      }
      for (; c < a_.dim; ++c) to[c] = p ? to[c] + from[c] * factor[0] : from[c] * factor[0];
    }
  }

  // e^(page's - row's); 0 where the row sees nothing
  static f32x16 part_of(f32x16 page, f32x16 row) {
    return page == -kInf ? f32x16{} : exp2((page - row) * kLog2e);
  }

  // The same of up to 16 queries.
  static f32x16 share(const float* page, const float* row, int64_t count) {
    f32x16 p = splat(-kInf), l = {};
    if (count >= 16) {
      p = load<f32x16>(page);
      l = load<f32x16>(row);
    } else {
      std::memcpy(&p, page, static_cast<size_t>(count) * sizeof(float));
      std::memcpy(&l, row, static_cast<size_t>(count) * sizeof(float));
    }
    return part_of(p, l);
  }

  // The masses of one page, its queries in the lanes.
  void mass(int64_t page) {
    int64_t part = 0, within = page;
    while (within >= a_.parts[part].pages) within -= a_.parts[part++].pages;
    const float* from = a_.parts[part].page_lse + within * rows_;
    const float* row = lse_ + a_.heads[page] * rows_;
    const int64_t tail = a_.tokens > kWindow ? a_.tokens - kWindow : 0;
    f32x16 peak = {}, before = {}, window = {}, last = {};
    for (int64_t g = 0; g < a_.group; ++g, from += a_.tokens, row += a_.tokens) {
      // up to the window, then the window, so that each sum is of whole vectors
      for (int64_t t = 0; t < tail; t += 16) {
        const f32x16 x = share(from + t, row + t, tail - t);
        peak = max(peak, x);
        before += x;
      }
      f32x16 x = {};
      for (int64_t t = tail; t < a_.tokens; t += 16) {
        x = share(from + t, row + t, a_.tokens - t);
        peak = max(peak, x);
        window += x;
      }
      last += x;
    }
    alignas(64) float lanes[16];
    store(lanes, last);
    const float mean = 1.0f / static_cast<float>(a_.group), recent = sum_of(window);
    float* to = a_.masses + page;
    to[0] = top_of(peak);
    to[a_.pages] = (sum_of(before) + recent) * mean;
    to[2 * a_.pages] = lanes[(a_.tokens - tail - 1) % 16] * mean;
    to[3 * a_.pages] = recent * mean;
  }

  // Where there is one query: the masses of pages `first` up to `last`, across the parts that have them.
  void masses_of_one(int64_t first, int64_t last) {
    int64_t begin = 0;  // of the part
    for (int64_t p = 0; first < last; begin += a_.parts[p++].pages) {
      const int64_t end = begin + a_.parts[p].pages < last ? begin + a_.parts[p].pages : last;
      for (int64_t count; first < end; first += count) {
        count = end - first < 16 ? end - first : 16;
        masses_of_one(a_.parts[p], first, first - begin, count);
      }
    }
  }

  // Of up to 16 pages, in the lanes.
  void masses_of_one(const SettlePart& part, int64_t first, int64_t within, int64_t count) {
    const float mean = 1.0f / static_cast<float>(a_.group);
    f32x16 peak = {}, total = {};
    const int64_t head = a_.heads[first];
    const bool alone = head == a_.heads[first + count - 1];
    for (int64_t g = 0; g < a_.group; ++g) {
      f32x16 page = splat(-kInf), row = splat(lse_[head * a_.group + g]);
      const float* from = part.page_lse + g * part.pages + within;
      if (count == 16)
        page = load<f32x16>(from);
      else
        std::memcpy(&page, from, static_cast<size_t>(count) * sizeof(float));
      if (!alone) {
        alignas(64) float rows[16] = {};
        for (int64_t i = 0; i < count; ++i) rows[i] = lse_[a_.heads[first + i] * a_.group + g];
        row = load<f32x16>(rows);
      }
      const f32x16 x = part_of(page, row);
      peak = max(peak, x);
      total += x;
    }
    alignas(64) float lanes[16];
    total *= mean;
    for (int kind = 0; kind < 4; ++kind) {
      store(lanes, kind ? total : peak);
      std::memcpy(a_.masses + kind * a_.pages + first, lanes, static_cast<size_t>(count) * sizeof(float));
    }
  }

  const SettleArgs& a_;
  const int64_t rows_;
  float* lse_;
};

}  // namespace

bool settle(const SettleArgs& args) {
  const size_t rows = static_cast<size_t>(args.kv_heads * args.group * args.tokens);
  float few[256];
  float* lse = rows <= 256 ? few : static_cast<float*>(__builtin_malloc(rows * sizeof(float)));
  if (!lse) return false;
  Settle(args, lse).run();
  if (lse != few) __builtin_free(lse);
  return true;
}

}  // namespace kvpager::KV_ISA
