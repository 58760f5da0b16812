// Groups of pages joined by their log-sum-exp, and what each page got of the attention.
#include "attention.h"
#include "attention_vec.h"
#include "threads.h"

namespace kvpager::KV_ISA {

namespace {

constexpr int64_t kWindow = 32;      // queries of SnapKV's observation window: ports.WINDOW
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
    each(a_.pages, a_.pages * rows_ * 4, 8, [this](int64_t page) { mass(page); });
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

  // e^(page's - row's) of up to 16 queries; 0 where the row sees nothing
  static f32x16 share(const float* page, const float* row, int64_t count) {
    f32x16 p = splat(-kInf), l = {};
    if (count >= 16) {
      p = load<f32x16>(page);
      l = load<f32x16>(row);
    } else {
      std::memcpy(&p, page, static_cast<size_t>(count) * sizeof(float));
      std::memcpy(&l, row, static_cast<size_t>(count) * sizeof(float));
    }
    return p == -kInf ? f32x16{} : exp(p - l);
  }

  void mass(int64_t page) {
    int64_t part = 0, within = page;
    while (within >= a_.parts[part].pages) within -= a_.parts[part++].pages;
    const float* from = a_.parts[part].page_lse + within * rows_;
    const float* row = lse_ + a_.heads[page] * rows_;
    const int64_t tail = a_.tokens > kWindow ? a_.tokens - kWindow : 0;
    f32x16 peak = {};
    float total = 0, window = 0, last = 0;
    for (int64_t g = 0; g < a_.group; ++g, from += a_.tokens, row += a_.tokens) {
      // up to the window, then the window, so that each sum is of whole vectors
      f32x16 sum = {};
      for (int64_t t = 0; t < tail; t += 16) {
        const f32x16 x = share(from + t, row + t, tail - t);
        peak = max(peak, x);
        sum += x;
      }
      total += sum_of(sum);
      sum = f32x16{};
      int64_t t = tail;
      f32x16 x = {};
      for (; t < a_.tokens; t += 16) {
        x = share(from + t, row + t, a_.tokens - t);
        peak = max(peak, x);
        sum += x;
      }
      window += sum_of(sum);
      alignas(64) float lanes[16];
      store(lanes, x);
      last += lanes[a_.tokens - 1 - (t - 16)];
    }
    const float mean = 1.0f / static_cast<float>(a_.group);
    float* to = a_.masses + page;
    to[0] = top_of(peak);
    to[a_.pages] = (total + window) * mean;
    to[2 * a_.pages] = last * mean;
    to[3 * a_.pages] = window * mean;
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
