// Packed matrices as Python holds them, and the checks of addresses that come from there. For bindings alone.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "linear.h"
#include "refuse.h"
#include "threads.h"

namespace kvpager {

namespace nb = nanobind;

using Memory = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;


inline int64_t groups_of(int64_t outputs) { return (outputs + kGroup - 1) / kGroup; }

template <class T>
T* address(uint64_t at, const char* name) {
  if (at == 0 || at % alignof(T) != 0) refuse(std::string(name) + ": not the address of an array");
  return reinterpret_cast<T*>(at);
}

inline int64_t rows_in(int64_t elements, int64_t width, const char* name) {
  if (elements < 0 || elements % width != 0)
    refuse(std::string(name) + ": " + std::to_string(elements) + " elements are no rows of " + std::to_string(width));
  return elements / width;
}

// Each thread that calls keeps its scratch memory, so that a call allocates nothing.
inline uint8_t* scratch(int64_t bytes) {
  struct Free {
    void operator()(uint8_t* at) const { ::operator delete(at, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<uint8_t, Free> memory;
  thread_local int64_t held = 0;
  if (bytes > held) {
    held = 0;
    memory.reset();
    memory.reset(static_cast<uint8_t*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{64})));
    held = bytes;
  }
  return memory.get();
}

inline Weights weights_named(const std::string& name) {
  if (name == "bfloat16") return Weights::bfloat16;
  if (name == "int8") return Weights::int8;
  refuse("weights: '" + name + "' is not one of bfloat16, int8");
}

inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline uint16_t narrow(float x) {  // finite numbers only
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

constexpr int64_t kFewRows = 8;  // of a decode step: the product waits for memory

class PackedMatrix {
 public:
  PackedMatrix(Memory memory, std::vector<int64_t> outputs, int64_t inputs, const std::string& weights, bool gated)
      : memory_(std::move(memory)), outputs_(std::move(outputs)), gated_(gated) {
    matrix_.weights = weights_named(weights);
    const size_t bytes = static_cast<size_t>(packed_bytes(outputs_, inputs, weights, gated));
    if (memory_.size() != bytes)
      refuse("memory: " + std::to_string(memory_.size()) + " bytes, not " + std::to_string(bytes));
    matrix_.packed = memory_.data();
    matrix_.inputs = inputs;
    matrix_.pairs = (inputs + 1) / 2;
    for (int64_t count : outputs_) {
      first_.push_back(matrix_.groups);
      matrix_.groups += gated ? groups_of(2 * ((count + kLanes - 1) / kLanes * kLanes)) : groups_of(count);
    }
    matrix_.scales = nullptr;
    matrix_.bias = nullptr;
    if (matrix_.weights == Weights::int8) scales_.assign(static_cast<size_t>(matrix_.groups * kGroup), 0.0f);
    if (!scales_.empty()) matrix_.scales = scales_.data();
  }
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  static int64_t packed_bytes(const std::vector<int64_t>& outputs, int64_t inputs, const std::string& weights,
                              bool gated) {
    constexpr int64_t kMost = int64_t{1} << 24;
    if (outputs.empty() || outputs.size() > 3) refuse("outputs: 1 to 3 parts, not " + std::to_string(outputs.size()));
    if (gated && outputs.size() != 1) refuse("outputs: a gated matrix has one part");
    if (inputs < 1 || inputs > kMost) refuse("inputs: " + std::to_string(inputs) + " is not in 1.." + std::to_string(kMost));
    int64_t groups = 0;
    for (int64_t count : outputs) {
      if (count < 1 || count > kMost)
        refuse("outputs: " + std::to_string(count) + " is not in 1.." + std::to_string(kMost));
      groups += gated ? (count + kLanes - 1) / kLanes : groups_of(count);
    }
    return groups * ((inputs + 1) / 2) * step_bytes(weights_named(weights));
  }

  // Packs bfloat16 [rows][inputs] as the outputs [first, first + rows) of a part; `half` 1 is what a gate multiplies.
  void write(int part, int half, int64_t first, uint64_t from, int64_t elements) {
    const int64_t rows = rows_in(elements, matrix_.inputs, "from");
    check_place(part, half, first, rows);
    const auto* source = address<const uint16_t>(from, "from");
    const nb::gil_scoped_release release;
    constexpr int64_t kAtOnce = 64;
    std::atomic<bool> broken{false};
    parallel((rows + kAtOnce - 1) / kAtOnce, [&](int64_t item, int) {
      for (int64_t row = item * kAtOnce; row < std::min(rows, (item + 1) * kAtOnce); ++row)
        if (!write_row(place(part, half, first + row), source + row * matrix_.inputs)) broken = true;
    });
    if (broken) {
      const nb::gil_scoped_acquire acquire;
      refuse("from: weights that are not finite can't be held as int8");
    }
  }

  // The other way: bfloat16 [rows][inputs], as they were; int8 weights times their scale.
  void read(int part, int half, int64_t first, uint64_t to, int64_t elements) const {
    const int64_t rows = rows_in(elements, matrix_.inputs, "to");
    check_place(part, half, first, rows);
    auto* target = address<uint16_t>(to, "to");
    const nb::gil_scoped_release release;
    constexpr int64_t kAtOnce = 64;
    parallel((rows + kAtOnce - 1) / kAtOnce, [&](int64_t item, int) {
      for (int64_t row = item * kAtOnce; row < std::min(rows, (item + 1) * kAtOnce); ++row)
        read_row(place(part, half, first + row), target + row * matrix_.inputs);
    });
  }

  // Rows by their numbers, int64 [count], into bfloat16 [count][inputs]: an embedding.
  void read_rows(uint64_t ids, int64_t count, uint64_t to, int64_t elements) const {
    if (outputs_.size() != 1 || gated_) refuse("ids: this matrix is of several parts");
    if (count < 0 || rows_in(elements, matrix_.inputs, "to") != count)
      refuse("to: not " + std::to_string(count) + " rows of " + std::to_string(matrix_.inputs));
    if (count == 0) return;
    const auto* wanted = address<const int64_t>(ids, "ids");
    auto* target = address<uint16_t>(to, "to");
    for (int64_t i = 0; i < count; ++i)
      if (wanted[i] < 0 || wanted[i] >= outputs_[0])
        throw std::out_of_range("ids: " + std::to_string(wanted[i]) + " is not in 0.." + std::to_string(outputs_[0] - 1));
    const nb::gil_scoped_release release;
    const auto one = [&](int64_t i, int) { read_row(wanted[i], target + i * matrix_.inputs); };
    if (count > 4) {
      parallel(count, [&](int64_t i, int thread) { one(i, thread); });
    } else {
      for (int64_t i = 0; i < count; ++i) one(i, 0);
    }
  }

  // A bias for each output of a part, bfloat16.
  void set_bias(int part, int half, uint64_t from, int64_t elements) {
    check_place(part, half, 0, 0);
    if (elements != outputs_[static_cast<size_t>(part)])
      refuse("bias: " + std::to_string(elements) + " numbers for " +
             std::to_string(outputs_[static_cast<size_t>(part)]) + " outputs");
    const auto* source = address<const uint16_t>(from, "bias");
    if (bias_.empty()) bias_.assign(static_cast<size_t>(matrix_.groups * kGroup), 0.0f);
    matrix_.bias = bias_.data();
    for (int64_t i = 0; i < elements; ++i) bias_[static_cast<size_t>(place(part, half, i))] = widen(source[i]);
  }

  void product(uint64_t x, int64_t elements, const uint64_t* to, const int64_t* sizes, size_t parts) const {
    if (gated_) refuse("matrix: a gated one takes gated() alone");
    if (parts != outputs_.size()) refuse("to: " + std::to_string(parts) + " arrays for " + std::to_string(outputs_.size()) + " parts");
    const int64_t rows = rows_in(elements, matrix_.inputs, "x");
    Output outputs[3];
    for (size_t i = 0; i < parts; ++i) {
      if (sizes[i] != rows * outputs_[i])
        refuse("to: " + std::to_string(sizes[i]) + " elements, not " + std::to_string(rows) + " rows of " +
               std::to_string(outputs_[i]));
      if (rows > 0) outputs[i] = {address<uint16_t>(to[i], "to"), outputs_[i]};
    }
    if (rows == 0) return;
    const auto* source = address<const uint16_t>(x, "x");
    const LinearTable& kernels = linear();
    const nb::gil_scoped_release release;
    kernels.product(matrix_, source, rows, outputs, static_cast<int>(parts),
                    scratch(kernels.product_scratch(matrix_, rows)));
    if (rows <= kFewRows) {
      const Range read[] = {range()};
      read_in_order(read, 1);
    }
  }

  void gated(const PackedMatrix& down, int activation, uint64_t x, int64_t elements, uint64_t to,
             int64_t size) const {
    if (!gated_) refuse("matrix: not a gated one");
    if (down.gated_ || down.outputs_.size() != 1) refuse("down: it has several parts");
    if (down.matrix_.inputs != outputs_[0])
      refuse("down: it takes " + std::to_string(down.matrix_.inputs) + " inputs, not " + std::to_string(outputs_[0]));
    if (down.matrix_.weights != matrix_.weights) refuse("down: its weights are of another type");
    if (activation < 0 || activation > 2) refuse("activation: " + std::to_string(activation) + " is not in 0..2");
    const int64_t rows = rows_in(elements, matrix_.inputs, "x");
    if (size != rows * down.outputs_[0])
      refuse("to: " + std::to_string(size) + " elements, not " + std::to_string(rows) + " rows of " +
             std::to_string(down.outputs_[0]));
    if (rows == 0) return;
    const auto* source = address<const uint16_t>(x, "x");
    auto* target = address<uint16_t>(to, "to");
    const LinearTable& kernels = linear();
    const nb::gil_scoped_release release;
    kernels.gated(matrix_, down.matrix_, static_cast<Activation>(activation), source, rows,
                  {target, down.outputs_[0]}, scratch(kernels.gated_scratch(matrix_, down.matrix_, rows)));
    if (rows <= kFewRows) {
      const Range read[] = {range(), down.range()};
      read_in_order(read, 2);
    }
  }

  const Matrix& kernel() const { return matrix_; }
  bool is_gated() const { return gated_; }
  Range range() const { return {memory_.data(), static_cast<int64_t>(memory_.size())}; }
  const std::vector<int64_t>& outputs() const { return outputs_; }
  int64_t inputs() const { return matrix_.inputs; }
  int64_t bytes() const {
    return static_cast<int64_t>(memory_.size() + 4 * (scales_.size() + bias_.size()));
  }
  const char* weights() const { return matrix_.weights == Weights::int8 ? "int8" : "bfloat16"; }

 private:
  void check_place(int part, int half, int64_t first, int64_t rows) const {
    if (part < 0 || static_cast<size_t>(part) >= outputs_.size())
      refuse("part: " + std::to_string(part) + " is not in 0.." + std::to_string(outputs_.size() - 1));
    if (half < 0 || half > (gated_ ? 1 : 0)) refuse("half: " + std::to_string(half) + " is not a half of this matrix");
    if (first < 0 || rows > outputs_[static_cast<size_t>(part)] - first)
      refuse("first: rows " + std::to_string(first) + " to " + std::to_string(first + rows) + " are not in 0.." +
             std::to_string(outputs_[static_cast<size_t>(part)]));
  }

  // Where an output lies among all of the packed ones.
  int64_t place(int part, int half, int64_t output) const {
    const int64_t start = first_[static_cast<size_t>(part)] * kGroup;
    return gated_ ? start + output / kLanes * kGroup + half * kLanes + output % kLanes : start + output;
  }

  uint8_t* at(int64_t place) const {
    const int64_t item = matrix_.weights == Weights::int8 ? 1 : 2;
    return memory_.data() + place / kGroup * matrix_.pairs * step_bytes(matrix_.weights) + place % kGroup * 2 * item;
  }

  bool write_row(int64_t place, const uint16_t* from) {
    uint8_t* to = at(place);
    const int64_t step = step_bytes(matrix_.weights), inputs = matrix_.inputs;
    if (matrix_.weights == Weights::bfloat16) {
      for (int64_t pair = 0; pair < inputs / 2; ++pair) std::memcpy(to + pair * step, from + 2 * pair, 4);
      if (inputs % 2 != 0) std::memcpy(to + inputs / 2 * step, from + inputs - 1, 2);
      return true;
    }
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < inputs; ++i) {
      finite = finite && (from[i] & 0x7F80) != 0x7F80;
      largest = std::max(largest, std::fabs(widen(from[i])));
    }
    if (!finite) return false;
    const float scale = largest / 127.0f;
    scales_[static_cast<size_t>(place)] = scale;
    for (int64_t i = 0; i < inputs; ++i) {
      const float whole = scale > 0.0f ? std::nearbyint(widen(from[i]) / scale) : 0.0f;
      to[i / 2 * step + i % 2] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(whole, -127.0f, 127.0f)));
    }
    return true;
  }

  void read_row(int64_t place, uint16_t* to) const {
    const uint8_t* from = at(place);
    const int64_t step = step_bytes(matrix_.weights), inputs = matrix_.inputs;
    if (matrix_.weights == Weights::bfloat16) {
      for (int64_t pair = 0; pair < inputs / 2; ++pair) std::memcpy(to + 2 * pair, from + pair * step, 4);
      if (inputs % 2 != 0) std::memcpy(to + inputs - 1, from + inputs / 2 * step, 2);
      return;
    }
    const float scale = scales_[static_cast<size_t>(place)];
    for (int64_t i = 0; i < inputs; ++i)
      to[i] = narrow(scale * static_cast<float>(static_cast<int8_t>(from[i / 2 * step + i % 2])));
  }

  Memory memory_;
  std::vector<int64_t> outputs_, first_;
  std::vector<float> scales_, bias_;
  Matrix matrix_{};
  bool gated_;
};

}  // namespace kvpager
