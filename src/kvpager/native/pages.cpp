// Tokens into frames and back, whole pages copied; layout.h says how a page lies.
#include "pages.h"

#include "attention_vec.h"
#include "threads.h"

namespace kvpager::KV_ISA {

namespace {

constexpr int64_t kSmall = 1 << 17;  // bytes, below which waking other threads costs more

template <class F>
void each_page(int64_t pages, int64_t page_bytes, F&& f) {
  const int64_t batch = 1 + 32768 / page_bytes;
  if (pages * page_bytes < kSmall) {
    for (int64_t i = 0; i < pages; ++i) f(i);
    return;
  }
  parallel((pages + batch - 1) / batch, [&](int64_t b, int) {
    for (int64_t i = b * batch; i < pages && i < (b + 1) * batch; ++i) f(i);
  });
}

typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));

// How numbers are held. `Four` is a vector of four units: a unit is what lies together among the keys, a number or a
// pair. Rows are `n` numbers, a multiple of 8.
struct Plain32 {
  using Item = float;
  using Four = u32x4;
  static KV_INLINE void narrow(const float* from, Item* to, int64_t n) { std::memcpy(to, from, sizeof(float) * n); }
  static KV_INLINE void widen(const Item* from, float* to, int64_t n) { std::memcpy(to, from, sizeof(float) * n); }
};

struct Plain16 {
  using Item = uint16_t;
  using Four = u16x4;
  static KV_INLINE void narrow(const float* from, Item* to, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(to + i, narrow_f16(load<f32x16>(from + i)));
    if (i < n) {
      const u16x16 last = narrow_f16(joined(load<f32x8>(from + i), f32x8{}));
      std::memcpy(to + i, &last, 16);
    }
  }
  static KV_INLINE void widen(const Item* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(to + i, widen_f16(load<u16x16>(from + i)));
    if (i < n) {
      u16x16 last = {};
      std::memcpy(&last, from + i, 16);
      const f32x16 wide = widen_f16(last);
      std::memcpy(to + i, &wide, 32);
    }
  }
};

struct Brain16 {
  using Item = uint16_t;
  using Four = u32x4;  // pairs
  // to nearest, ties to even, in the upper half; NaN stays NaN
  static KV_INLINE u32x8 rounded(u32x8 bits) {
    const u32x8 even = bits + (((bits >> 16) & 1) + 0x7FFFu);
    return (i32x8)(bits & 0x7FFFFFFFu) > 0x7F800000 ? bits | 0x400000u : even;
  }
  static KV_INLINE void narrow(const float* from, Item* to, int64_t n) {
    for (int64_t i = 0; i < n; i += 8)
      store(to + i, __builtin_convertvector(rounded(load<u32x8>(from + i)) >> 16, u16x8));
  }
  static KV_INLINE void widen(const Item* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) store(to + i, __builtin_convertvector(load<u16x8>(from + i), u32x8) << 16);
  }
};

// The rows of a 4 x 4 matrix become its columns.
template <class V>
KV_INLINE void turn(V (&m)[4]) {
  const V low_0 = __builtin_shufflevector(m[0], m[1], 0, 4, 1, 5), high_0 = __builtin_shufflevector(m[0], m[1], 2, 6, 3, 7);
  const V low_1 = __builtin_shufflevector(m[2], m[3], 0, 4, 1, 5), high_1 = __builtin_shufflevector(m[2], m[3], 2, 6, 3, 7);
  m[0] = __builtin_shufflevector(low_0, low_1, 0, 1, 4, 5);
  m[1] = __builtin_shufflevector(low_0, low_1, 2, 3, 6, 7);
  m[2] = __builtin_shufflevector(high_0, high_1, 0, 1, 4, 5);
  m[3] = __builtin_shufflevector(high_0, high_1, 2, 3, 6, 7);
}

// Where the pair (or single) of channels `c` of token `t` lies among the keys, and among the values, in items.
struct Places {
  int64_t dim, block, pair, page;
  explicit Places(const Layout& l, int64_t pair)
      : dim(l.head_dim), block(l.block), pair(pair), page(static_cast<int64_t>(l.page_size) * l.head_dim) {}
  int64_t key(int64_t t, int64_t c) const {
    return (t / block * (dim / pair) + c / pair) * block * pair + t % block * pair + c % pair;
  }
  int64_t value(int64_t t, int64_t c) const { return (t / pair * dim + c) * pair + t % pair; }
};

constexpr int64_t kMostDim = 256;

// Keys of four tokens of a row each, [4][kMostDim], to or from their place: `key` is that of the first token.
template <class P, int kPair>
KV_INLINE void write_keys(const typename P::Item* rows, typename P::Item* key, const Layout& l) {
  const int64_t unit = l.block * kPair;
  for (int64_t c = 0; c < l.head_dim; c += 4 * kPair) {
    typename P::Four m[4];
    for (int i = 0; i < 4; ++i) m[i] = load<typename P::Four>(rows + i * kMostDim + c);
    turn(m);
    for (int i = 0; i < 4; ++i) store(key + (c / kPair + i) * unit, m[i]);
  }
}

template <class P, int kPair>
KV_INLINE void read_keys(typename P::Item* rows, const typename P::Item* key, const Layout& l) {
  const int64_t unit = l.block * kPair;
  for (int64_t c = 0; c < l.head_dim; c += 4 * kPair) {
    typename P::Four m[4];
    for (int i = 0; i < 4; ++i) m[i] = load<typename P::Four>(key + (c / kPair + i) * unit);
    turn(m);
    for (int i = 0; i < 4; ++i) store(rows + i * kMostDim + c, m[i]);
  }
}

template <class P, int kPair>
void write_page(const TokenArgs& a, int64_t i) {
  using Item = typename P::Item;
  const Layout& l = a.view.layout;
  const Places places(l, kPair);
  const int64_t dim = l.head_dim;
  Item* page = reinterpret_cast<Item*>(a.view.frames + a.frames[i] * l.page_bytes);
  Item* values = page + places.page;
  Item rows[4 * kMostDim];
  for (int64_t t = 0; t < a.tokens;) {
    const int64_t at = a.offset + t, from = (i * a.tokens + t) * dim;
    Item* key = page + places.key(at, 0);
    const bool four = at % 4 == 0 && t + 4 <= a.tokens;  // blocks are of 8 tokens or more: four never straddle two
    const int64_t count = four ? 4 : 1;
    for (int64_t k = 0; k < count; ++k) P::narrow(a.keys + from + k * dim, rows + k * kMostDim, dim);
    if (four) {
      write_keys<P, kPair>(rows, key, l);
    } else {
      for (int64_t c = 0; c < dim; c += kPair, key += l.block * kPair) std::memcpy(key, rows + c, sizeof(Item) * kPair);
    }
    for (int64_t k = 0; k < count;) {
      Item* value = values + places.value(at + k, 0);
      const float* row = a.values + from + k * dim;
      if constexpr (kPair == 1) {
        P::narrow(row, value, dim);
        ++k;
      } else if (four) {  // two tokens that lie in one another
        for (int64_t c = 0; c < dim; c += 8) {
          const u32x8 first = P::rounded(load<u32x8>(row + c)), second = P::rounded(load<u32x8>(row + dim + c));
          store(value + 2 * c, (first >> 16) | (second & 0xFFFF0000u));
        }
        k += 2;
      } else {
        P::narrow(row, rows, dim);
        for (int64_t c = 0; c < dim; ++c) value[c * 2] = rows[c];
        ++k;
      }
    }
    t += count;
  }
}

template <class P, int kPair>
void read_page(const TokenArgs& a, int64_t i) {
  using Item = typename P::Item;
  const Layout& l = a.view.layout;
  const Places places(l, kPair);
  const int64_t dim = l.head_dim;
  const Item* page = reinterpret_cast<const Item*>(a.view.frames + a.frames[i] * l.page_bytes);
  const Item* values = page + places.page;
  Item rows[4 * kMostDim];
  for (int64_t t = 0; t < l.page_size; t += 4) {
    const int64_t to = i * places.page + t * dim;
    read_keys<P, kPair>(rows, page + places.key(t, 0), l);
    for (int64_t k = 0; k < 4; ++k) P::widen(rows + k * kMostDim, a.keys + to + k * dim, dim);
    for (int64_t k = 0; k < 4; k += kPair) {
      const Item* value = values + places.value(t + k, 0);
      float* row = a.values + to + k * dim;
      if constexpr (kPair == 1) {
        P::widen(value, row, dim);
      } else {
        for (int64_t c = 0; c < dim; c += 8) {
          const u32x8 both = load<u32x8>(value + 2 * c);
          store(row + c, both << 16);
          store(row + dim + c, both & 0xFFFF0000u);
        }
      }
    }
  }
}

// The least bfloat16 that is not below x / 127, for x of 0 and above
uint16_t scale_above(float x) {
  const float wanted = x / 127.0f;
  uint32_t bits;
  std::memcpy(&bits, &wanted, 4);
  return static_cast<uint16_t>((bits + 0xFFFFu) >> 16);
}

float magnitude(float x) { return x < 0 ? -x : x; }

// What a number is divided by: its scale, or anything where all numbers are zeros
float step_of(uint16_t scale) { return scale ? bf16_to_float(scale) : 1.0f; }

int8_t code_of(float x, float step) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
  const float code = (x / step + magic) - magic;
  return static_cast<int8_t>(x == x ? static_cast<int32_t>(code) : 0);
}

// Keys and values [P][D] as codes and scales, in the frame. Loops over channels, which the compiler makes vectors of.
void quantise(const Layout& l, const float* keys, const float* values, uint8_t* page) {
  const Places places(l, 2);
  const int64_t dim = l.head_dim;
  float most[256] = {}, steps[256];
  int8_t codes[256];
  for (int64_t t = 0; t < l.page_size; ++t)
    for (int64_t c = 0; c < dim; ++c) {
      const float size = magnitude(keys[t * dim + c]);
      most[c] = size > most[c] ? size : most[c];
    }
  for (int64_t c = 0; c < dim; ++c) {
    const uint16_t scale = scale_above(most[c]);
    store(page + l.key_scales + 2 * c, scale);
    steps[c] = step_of(scale);
  }
  for (int64_t t = 0; t < l.page_size; ++t) {
    for (int64_t c = 0; c < dim; ++c) codes[c] = code_of(keys[t * dim + c], steps[c]);
    uint8_t* to = page + places.key(t, 0);
    for (int64_t c = 0; c < dim; c += 2, to += 2 * l.block) std::memcpy(to, codes + c, 2);
  }
  for (int64_t t = 0; t < l.page_size; ++t) {
    const float* row = values + t * dim;
    for (int64_t c = 0; c < dim; ++c) steps[c] = magnitude(row[c]);
    float top = 0;
    for (int64_t c = 0; c < dim; ++c) top = steps[c] > top ? steps[c] : top;
    const uint16_t scale = scale_above(top);
    store(page + l.value_scales + 2 * t, scale);
    const float step = step_of(scale);
    for (int64_t c = 0; c < dim; ++c) codes[c] = code_of(row[c], step);
    uint8_t* to = page + l.values + places.value(t, 0);
    for (int64_t c = 0; c < dim; ++c) to[2 * c] = static_cast<uint8_t>(codes[c]);
  }
}

void restore(const Layout& l, const uint8_t* page, float* keys, float* values) {
  const Places places(l, 2);
  const int8_t* key_codes = reinterpret_cast<const int8_t*>(page);
  const int8_t* value_codes = reinterpret_cast<const int8_t*>(page + l.values);
  for (int64_t t = 0; t < l.page_size; ++t) {
    const float value_scale = bf16_to_float(load<uint16_t>(page + l.value_scales + 2 * t));
    for (int64_t c = 0; c < l.head_dim; ++c) {
      const float key_scale = bf16_to_float(load<uint16_t>(page + l.key_scales + 2 * c));
      keys[t * l.head_dim + c] = static_cast<float>(key_codes[places.key(t, c)]) * key_scale;
      values[t * l.head_dim + c] = static_cast<float>(value_codes[places.value(t, c)]) * value_scale;
    }
  }
}

void write_coded(const TokenArgs& a, int64_t i) {
  const Layout& l = a.view.layout;
  const int64_t size = static_cast<int64_t>(l.page_size) * l.head_dim;
  uint8_t* page = a.view.frames + a.frames[i] * l.page_bytes;
  const float* keys = a.keys + i * a.tokens * l.head_dim;
  const float* values = a.values + i * a.tokens * l.head_dim;
  if (a.slots[i] < 0) {  // a whole page
    quantise(l, keys, values, page);
    return;
  }
  float* slot = a.view.slot(a.slots[i]);
  const size_t bytes = sizeof(float) * static_cast<size_t>(a.tokens * l.head_dim);
  std::memcpy(slot + a.offset * l.head_dim, keys, bytes);
  std::memcpy(slot + size + a.offset * l.head_dim, values, bytes);
  if (a.offset + a.tokens == l.page_size) quantise(l, slot, slot + size, page);
}

void read_coded(const TokenArgs& a, int64_t i) {
  const Layout& l = a.view.layout;
  const int64_t size = static_cast<int64_t>(l.page_size) * l.head_dim;
  float *keys = a.keys + i * size, *values = a.values + i * size;
  if (a.slots[i] < 0) {
    restore(l, a.view.frames + a.frames[i] * l.page_bytes, keys, values);
    return;
  }
  const float* slot = a.view.slot(a.slots[i]);
  std::memcpy(keys, slot, sizeof(float) * static_cast<size_t>(size));
  std::memcpy(values, slot + size, sizeof(float) * static_cast<size_t>(size));
}

void write(const TokenArgs& a) {
  const int64_t bytes = a.tokens * a.view.layout.head_dim * 8;
  switch (a.view.layout.dtype) {
    case DType::float32: each_page(a.pages, bytes, [&](int64_t i) { write_page<Plain32, 1>(a, i); }); break;
    case DType::float16: each_page(a.pages, bytes, [&](int64_t i) { write_page<Plain16, 1>(a, i); }); break;
    case DType::bfloat16: each_page(a.pages, bytes, [&](int64_t i) { write_page<Brain16, 2>(a, i); }); break;
    default: each_page(a.pages, bytes, [&](int64_t i) { write_coded(a, i); });
  }
}

void read(const TokenArgs& a) {
  const int64_t bytes = a.tokens * a.view.layout.head_dim * 8;
  switch (a.view.layout.dtype) {
    case DType::float32: each_page(a.pages, bytes, [&](int64_t i) { read_page<Plain32, 1>(a, i); }); break;
    case DType::float16: each_page(a.pages, bytes, [&](int64_t i) { read_page<Plain16, 1>(a, i); }); break;
    case DType::bfloat16: each_page(a.pages, bytes, [&](int64_t i) { read_page<Brain16, 2>(a, i); }); break;
    default: each_page(a.pages, bytes, [&](int64_t i) { read_coded(a, i); });
  }
}

void copy(const FrameView& view, const int64_t* from, const int64_t* to, int64_t pages) {
  const size_t bytes = view.layout.page_bytes;
  // targets are distinct and no source: pages can be copied in any order
  each_page(pages, static_cast<int64_t>(bytes),
            [&](int64_t i) { std::memcpy(view.frames + to[i] * bytes, view.frames + from[i] * bytes, bytes); });
}

void load_pages(const FrameView& view, const int64_t* frames, const uint8_t* bytes, int64_t pages) {
  const size_t size = view.layout.page_bytes;
  each_page(pages, static_cast<int64_t>(size),
            [&](int64_t i) { std::memcpy(view.frames + frames[i] * size, bytes + i * size, size); });
}

void dump(const FrameView& view, const int64_t* frames, uint8_t* bytes, int64_t pages) {
  const size_t size = view.layout.page_bytes;
  each_page(pages, static_cast<int64_t>(size),
            [&](int64_t i) { std::memcpy(bytes + i * size, view.frames + frames[i] * size, size); });
}

void widen(DType dtype, const void* from, float* to, int64_t count) {
  switch (dtype) {
    case DType::float32: Plain32::widen(static_cast<const float*>(from), to, count); break;
    case DType::float16: Plain16::widen(static_cast<const uint16_t*>(from), to, count); break;
    default: Brain16::widen(static_cast<const uint16_t*>(from), to, count);
  }
}

void narrow(DType dtype, const float* from, void* to, int64_t count) {
  switch (dtype) {
    case DType::float32: Plain32::narrow(from, static_cast<float*>(to), count); break;
    case DType::float16: Plain16::narrow(from, static_cast<uint16_t*>(to), count); break;
    default: Brain16::narrow(from, static_cast<uint16_t*>(to), count);
  }
}

// Finite numbers are ordered as their bits are, NaN and infinity beyond them.
template <class Item>
Item largest_bits(const void* row, int64_t count) {
  const auto* items = static_cast<const Item*>(row);
  constexpr Item kSize = static_cast<Item>(~Item{0}) >> 1;
  Item most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Item size = items[i] & kSize;
    most = size > most ? size : most;
  }
  return most;
}

bool within(DType dtype, const void* row, int64_t count, float most) {
  float largest;
  if (dtype == DType::float32) {
    const uint32_t bits = largest_bits<uint32_t>(row, count);
    std::memcpy(&largest, &bits, sizeof largest);
  } else {
    const uint16_t bits = largest_bits<uint16_t>(row, count);
    u16x16 lanes = {};
    lanes[0] = bits;
    largest = dtype == DType::float16 ? widen_f16(lanes)[0] : bf16_to_float(bits);
  }
  return largest <= most;
}

constexpr PagesTable kTable{write, read, copy, load_pages, dump, widen, narrow, within};

}  // namespace

const PagesTable& pages_table() { return kTable; }

}  // namespace kvpager::KV_ISA
