#include "norms.h"

#include "threads.h"
#include "vec.h"

namespace kvpager::KV_ISA {
namespace {

constexpr int64_t kSmall = 32 * 1024;  // numbers that one thread normalises sooner than others wake
constexpr int64_t kRowsAtOnce = 16;    // rows of one item

KV_INLINE u16x16 read(const uint16_t* from, int64_t left) {
  if (left >= 16) return load<u16x16>(from);
  u16x16 bits{};
  std::memcpy(&bits, from, 2 * static_cast<size_t>(left));
  return bits;
}

// NaN stays NaN.
KV_INLINE u16x16 narrow(f32x16 x) {
  const i32x16 broken = x != x;
  return narrow_bf16(x) | (__builtin_convertvector((u32x16)broken, u16x16) & (uint16_t)0x7FC0);
}

KV_INLINE void write(uint16_t* to, int64_t left, f32x16 x) {
  const u16x16 bits = narrow(x);
  if (left >= 16) {
    store(to, bits);
  } else {
    std::memcpy(to, &bits, 2 * static_cast<size_t>(left));
  }
}

// f(row) for rows that are `width` numbers of work each, over the threads where there is enough of it.
template <class F>
KV_INLINE void each_row(int64_t rows, int64_t width, F&& f) {
  const auto some = [&](int64_t item) {
    const int64_t end = (item + 1) * kRowsAtOnce < rows ? (item + 1) * kRowsAtOnce : rows;
    for (int64_t row = item * kRowsAtOnce; row < end; ++row) f(row);
  };
  const int64_t items = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  if (rows * width > kSmall) {
    parallel(items, [&](int64_t item, int) { some(item); });
  } else {
    for (int64_t item = 0; item < items; ++item) some(item);
  }
}

template <bool kPlusOne>
KV_INLINE void one(const uint16_t* x, const uint16_t* weight, float epsilon, int64_t width, uint16_t* y) {
  f32x16 squares{};
  for (int64_t i = 0; i < width; i += 16) {
    const f32x16 v = widen_bf16(read(x + i, width - i));
    squares = fma(v, v, squares);
  }
  float sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += squares[lane];
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + epsilon);
  for (int64_t i = 0; i < width; i += 16) {
    const f32x16 v = widen_bf16(read(x + i, width - i)) * scale;
    const f32x16 w = widen_bf16(read(weight + i, width - i));
    write(y + i, width - i, kPlusOne ? v * (w + 1.0f) : widen_bf16(narrow(v)) * w);
  }
}

template <bool kPlusOne>
void normalise(const uint16_t* x, const uint16_t* weight, float epsilon, int64_t rows, int64_t width, uint16_t* y) {
  each_row(rows, width, [&](int64_t row) {
    one<kPlusOne>(x + row * width, weight, epsilon, width, y + row * width);
  });
}

// One turned head, which may be turned where it lies.
KV_INLINE void turn(const uint16_t* x, const uint16_t* cosine, const uint16_t* sine, int64_t half, uint16_t* to) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const f32x16 a = widen_bf16(read(x + i, left)), b = widen_bf16(read(x + half + i, left));
    const f32x16 first = a * widen_bf16(read(cosine + i, left));
    const f32x16 second = b * widen_bf16(read(cosine + half + i, left));
    const f32x16 from_second = -b * widen_bf16(read(sine + i, left));
    const f32x16 from_first = a * widen_bf16(read(sine + half + i, left));
    write(to + i, left, widen_bf16(narrow(first)) + widen_bf16(narrow(from_second)));
    write(to + half + i, left, widen_bf16(narrow(second)) + widen_bf16(narrow(from_first)));
  }
}

void rotate(const uint16_t* x, const uint16_t* cosine, const uint16_t* sine, int64_t tokens, int64_t angles,
            int64_t heads, int64_t width, uint16_t* to) {
  const int64_t half = width / 2;
  each_row(tokens, heads * width, [&](int64_t token) {
    const uint16_t* c = cosine + token % angles * width;
    const uint16_t* s = sine + token % angles * width;
    for (int64_t at = token * heads * width; at < (token + 1) * heads * width; at += width)
      turn(x + at, c, s, half, to + at);
  });
}

constexpr NormTable kTable{&normalise<false>, &normalise<true>, &rotate};

}  // namespace

const NormTable& norm_table() { return kTable; }

}  // namespace kvpager::KV_ISA
