#include "linear.h"

#include "activations.h"
#include "linear_tile.h"
#include "threads.h"
#include "vec.h"

namespace kvpager::KV_ISA {
namespace {

constexpr int64_t kRows = 48 * kPanel;   // rows in one go: bounds the scratch memory
constexpr int64_t kPart = 120 / kPanel;  // panels of one item: their inputs stay in the second-level cache
constexpr int64_t kSmall = 96 * 1024;    // bytes of weights (times rows) below which waking threads costs more

KV_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
KV_INLINE int64_t split(int64_t a, int64_t b) { return (a + b - 1) / b; }
KV_INLINE int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// NaN stays NaN. As the products themselves do there, AVX512-BF16 takes numbers below 2^-126 for zero.
#if defined(__AVX512BF16__)
KV_INLINE u16x16 narrow(f32x16 x) { return (u16x16)_mm512_cvtneps_pbh((__m512)x); }
#else
KV_INLINE u16x16 narrow(f32x16 x) {
  const u16x16 bits = narrow_bf16(x);
  const i32x16 broken = x != x;
  return bits | (__builtin_convertvector((u32x16)broken, u16x16) & (uint16_t)0x7FC0);
}
#endif

KV_INLINE f32x16 rounded(f32x16 x) { return widen_bf16(narrow(x)); }

// Rows are cut into panels of about the same size, at most kPanel; a panel lies as [pairs / kRun][its rows][kRun].
struct Panels {
  int64_t rows, count;
  explicit Panels(int64_t all) : rows(all), count(split(all, kPanel)) {}
  KV_INLINE int64_t start(int64_t panel) const { return panel * rows / count; }
};

// Pairs of a row's inputs, filled up to whole runs.
KV_INLINE int64_t padded(const Matrix& matrix) { return split(matrix.pairs, kRun) * kRun; }

// The inputs of some rows, laid out for tiles.
template <class Kind>
struct Inputs {
  Panels panels;
  const typename Kind::Pair* pairs;
  const float* scales;  // [chunks][rows], int8 only
};

template <class Kind>
int64_t inputs_bytes(const Matrix& matrix, int64_t rows) {
  return lines(rows * padded(matrix) * static_cast<int64_t>(sizeof(typename Kind::Pair))) +
         lines(rows * split(matrix.pairs, kChunk) * 4);
}

template <class F>
KV_INLINE void each(int64_t items, int64_t cost, F&& f) {
  if (cost < kSmall) {
    for (int64_t item = 0; item < items; ++item) f(item, 0);
  } else {
    parallel(items, [&](int64_t item, int thread) { f(item, thread); });
  }
}

void lay_out(Bfloat, const Matrix& matrix, const uint16_t* x, int64_t rows, int64_t, Bfloat::Pair* to, float*,
             int64_t) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < matrix.inputs; i += 2 * kRun)
      Bfloat::lay_out(x + r * matrix.inputs + i, matrix.inputs - i, to + i / 2 * rows + r * kRun);
}

// Rounds `count` inputs of one row to 16 bits; returns the scale. NaN and infinity make the scale NaN.
float quantise(const uint16_t* x, int64_t count, int16_t* to) {
  alignas(64) float wide[2 * kChunk] = {};
  f32x16 most{};
  i32x16 broken{};
  for (int64_t i = 0; i < count; i += kLanes) {
    u16x16 bits{};
    std::memcpy(&bits, x + i, 2 * static_cast<size_t>(least(kLanes, count - i)));
    const f32x16 v = widen_bf16(bits);
    const f32x16 size = v < 0.0f ? -v : v;
    broken |= (i32x16)(size - size != 0.0f);
    most = max(size, most);
    store(wide + i, v);
  }
  float largest = 0;
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (most[lane] > largest) largest = most[lane];
    any |= broken[lane];
  }
  const bool nothing = any != 0 || largest < 1e-30f;
  const float up = nothing ? 0.0f : 32767.0f / largest;
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32x16 v = nothing ? f32x16{} : load<f32x16>(wide + i) * up;
    const i32x16 near = (i32x16)(v + 12582912.0f) - 0x4B400000;  // to nearest: 1.5 * 2^23 leaves whole numbers
    typedef int16_t i16x16 __attribute__((vector_size(32)));
    store(to + i, __builtin_convertvector(near, i16x16));
  }
  return any != 0 ? __builtin_nanf("") : nothing ? 0.0f : largest / 32767.0f;
}

void lay_out(Int8, const Matrix& matrix, const uint16_t* x, int64_t rows, int64_t first, Int8::Pair* to,
             float* scales, int64_t stride) {
  alignas(64) int16_t whole[2 * kChunk];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t chunk = 0; chunk * kChunk < matrix.pairs; ++chunk) {
      const int64_t start = 2 * kChunk * chunk, count = least(2 * kChunk, matrix.inputs - start);
      scales[chunk * stride + first + r] = quantise(x + r * matrix.inputs + start, count, whole);
      const int64_t pairs = split(count, 2);
      Int8::Pair* run = to + kChunk * chunk * rows + r * kRun;
      for (int64_t pair = 0; pair < pairs; pair += kRun, run += kRun * rows)
        std::memcpy(run, whole + 2 * pair, 4 * static_cast<size_t>(least(kRun, pairs - pair)));
    }
}

// Lays the rows out in `scratch`.
template <class Kind>
Inputs<Kind> prepare(const Matrix& matrix, const uint16_t* x, int64_t rows, uint8_t* scratch) {
  const Panels panels(rows);
  auto* pairs = reinterpret_cast<typename Kind::Pair*>(scratch);
  const int64_t bytes = lines(rows * padded(matrix) * static_cast<int64_t>(sizeof(typename Kind::Pair)));
  auto* scales = reinterpret_cast<float*>(scratch + bytes);
  each(panels.count, panels.count > 1 ? 2 * bytes : 0, [&](int64_t panel, int) {
    const int64_t start = panels.start(panel), end = panels.start(panel + 1);
    lay_out(Kind{}, matrix, x + start * matrix.inputs, end - start, start, pairs + start * padded(matrix), scales, rows);
  });
  return {panels, pairs, scales};
}

// Pairs that one tile goes through. For bfloat16 any number gives the same bits: as few tiles as keep a group's weights in
// the second-level cache.
KV_INLINE int64_t chunk_of(Int8, const Matrix&) { return kChunk; }
KV_INLINE int64_t chunk_of(Bfloat, const Matrix& matrix) {
  return split(split(matrix.pairs, split(matrix.pairs, 2 * kChunk)), kRun) * kRun;
}

// One group's sums for the panels [first, last), handed to finish(row, block 0, block 1).
template <class Kind, class Finish>
KV_INLINE void group(const Matrix& matrix, const Inputs<Kind>& inputs, int64_t index, int64_t first, int64_t last,
                     Finish&& finish) {
  alignas(64) float sums[kPart * kPanel * kGroup];
  const Panels& panels = inputs.panels;
  const int64_t base = panels.start(first), end = panels.start(last);
  const uint8_t* w = matrix.packed + index * matrix.pairs * 2 * Kind::kBlockBytes;
  const int64_t chunk = chunk_of(Kind{}, matrix);
  for (int64_t pair = 0; pair < matrix.pairs; pair += chunk) {
    const int64_t steps = least(chunk, matrix.pairs - pair);
    const float* scales = inputs.scales + pair / kChunk * panels.rows;
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t start = panels.start(panel), rows = panels.start(panel + 1) - start;
      tile_of<Kind>(rows)(w + pair * 2 * Kind::kBlockBytes, inputs.pairs + start * padded(matrix) + pair * rows, steps,
                          sums + (start - base) * kGroup, pair == 0, scales + start);
    }
  }
  f32x16 scale[2] = {splat(1.0f), splat(1.0f)}, bias[2] = {};
  for (int b = 0; b < 2; ++b) {
    if (matrix.scales) scale[b] = load<f32x16>(matrix.scales + index * kGroup + b * kLanes);
    if (matrix.bias) bias[b] = load<f32x16>(matrix.bias + index * kGroup + b * kLanes);
  }
  for (int64_t row = base; row < end; ++row) {
    const float* from = sums + (row - base) * kGroup;
    finish(row, fused(load<f32x16>(from), scale[0], bias[0]), fused(load<f32x16>(from + kLanes), scale[1], bias[1]));
  }
}

// All groups times all rows, over the threads; finish(group, row, block 0, block 1).
template <class Kind, class Finish>
KV_INLINE void multiply(const Matrix& matrix, const Inputs<Kind>& inputs, Finish&& finish) {
  const int64_t panels = inputs.panels.count, parts = split(panels, kPart);
  const int64_t turns = matrix.groups / (4 * (threads() > 1 ? threads() : 1));
  const int64_t run = panels > 1 || turns < 1 ? 1 : turns;  // few rows: long runs keep the stream of weights going
  const int64_t runs = split(matrix.groups, run);
  const int64_t bytes = matrix.groups * matrix.pairs * 2 * Kind::kBlockBytes;
  each(parts * runs, bytes * split(inputs.panels.rows, 4), [&](int64_t item, int) {
    const int64_t part = item / runs, from = item % runs * run, to = least(from + run, matrix.groups);
    for (int64_t index = from; index < to; ++index)
      group(matrix, inputs, index, part * panels / parts, (part + 1) * panels / parts,
            [&](int64_t row, f32x16 a, f32x16 b) { finish(index, row, a, b); });
  });
}

// Stores a block's outputs, those below `outputs` alone; `added`, where it isn't null, is a row that they are added to.
KV_INLINE void put(uint16_t* row, int64_t column, int64_t outputs, f32x16 block, const uint16_t* added = nullptr) {
  u16x16 bits = narrow(block);
  if (added) {
    u16x16 other{};
    if (column + kLanes <= outputs) {
      other = load<u16x16>(added + column);
    } else if (column < outputs) {
      std::memcpy(&other, added + column, 2 * static_cast<size_t>(outputs - column));
    }
    bits = narrow(widen_bf16(other) + widen_bf16(bits));
  }
  if (column + kLanes <= outputs) {
    store(row + column, bits);
  } else if (column < outputs) {
    std::memcpy(row + column, &bits, 2 * static_cast<size_t>(outputs - column));
  }
}

template <class Kind>
void product_of(const Matrix& matrix, const uint16_t* x, int64_t rows, const Output* outputs, uint8_t* scratch) {
  const int64_t goes = split(rows, kRows);
  for (int64_t go = 0; go < goes; ++go) {
    const int64_t start = go * rows / goes, count = (go + 1) * rows / goes - start;
    const auto inputs = prepare<Kind>(matrix, x + start * matrix.inputs, count, scratch);
    multiply(matrix, inputs, [&](int64_t index, int64_t row, f32x16 a, f32x16 b) {
      const Output* output = outputs;
      while (index >= split(output->outputs, kGroup)) index -= split((output++)->outputs, kGroup);
      const int64_t at = (start + row) * output->outputs;
      const uint16_t* added = output->added ? output->added + at : nullptr;
      put(output->to + at, index * kGroup, output->outputs, a, added);
      put(output->to + at, index * kGroup + kLanes, output->outputs, b, added);
    });
  }
}

template <class Kind, f32x16 (*kActivate)(f32x16)>
void gated_of(const Matrix& gate_up, const Matrix& down, const uint16_t* x, int64_t rows, const Output& y,
              uint8_t* scratch) {
  const int64_t goes = split(rows, kRows), width = down.inputs;
  auto* hidden = reinterpret_cast<uint16_t*>(scratch);
  scratch += lines(2 * least(rows, kRows) * width);
  for (int64_t go = 0; go < goes; ++go) {
    const int64_t start = go * rows / goes, count = (go + 1) * rows / goes - start;
    multiply(gate_up, prepare<Kind>(gate_up, x + start * gate_up.inputs, count, scratch),
             [&](int64_t index, int64_t row, f32x16 gate, f32x16 up) {
               put(hidden + row * width, index * kLanes, width, rounded(kActivate(rounded(gate))) * rounded(up));
             });
    const int64_t at = start * y.outputs;
    const Output part{y.to + at, y.outputs, y.added ? y.added + at : nullptr};
    product_of<Kind>(down, hidden, count, &part, scratch);
  }
}

template <class Kind>
void gated_kind(const Matrix& gate_up, const Matrix& down, Activation activation, const uint16_t* x, int64_t rows,
                const Output& y, uint8_t* scratch) {
  switch (activation) {
    case Activation::silu: return gated_of<Kind, silu>(gate_up, down, x, rows, y, scratch);
    case Activation::gelu_tanh: return gated_of<Kind, gelu_tanh>(gate_up, down, x, rows, y, scratch);
    case Activation::gelu: return gated_of<Kind, gelu>(gate_up, down, x, rows, y, scratch);
  }
}

int64_t product_scratch(const Matrix& matrix, int64_t rows) {
  const int64_t some = least(rows, kRows);
  return matrix.weights == Weights::int8 ? inputs_bytes<Int8>(matrix, some) : inputs_bytes<Bfloat>(matrix, some);
}

int64_t gated_scratch(const Matrix& gate_up, const Matrix& down, int64_t rows) {
  const int64_t a = product_scratch(gate_up, rows), b = product_scratch(down, rows);
  return lines(2 * least(rows, kRows) * down.inputs) + (a > b ? a : b);
}

void product(const Matrix& matrix, const uint16_t* x, int64_t rows, const Output* outputs, int, uint8_t* scratch) {
  if (matrix.weights == Weights::int8) return product_of<Int8>(matrix, x, rows, outputs, scratch);
  product_of<Bfloat>(matrix, x, rows, outputs, scratch);
}

void gated(const Matrix& gate_up, const Matrix& down, Activation activation, const uint16_t* x, int64_t rows,
           const Output& y, uint8_t* scratch) {
  if (gate_up.weights == Weights::int8) return gated_kind<Int8>(gate_up, down, activation, x, rows, y, scratch);
  gated_kind<Bfloat>(gate_up, down, activation, x, rows, y, scratch);
}

constexpr LinearTable kTable{&product_scratch, &gated_scratch, &product, &gated};

}  // namespace

const LinearTable& linear_table() { return kTable; }

}  // namespace kvpager::KV_ISA
