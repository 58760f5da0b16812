// The memory of digests, and choosing among them; bindings alone include this.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "digest.h"
#include "memory.h"
#include "refuse.h"
#include "threads.h"

namespace kvpager {

namespace nb = nanobind;

constexpr size_t kKeptScratch = size_t{8} << 20;

using Rows = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Digests = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using GivenDigests = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Queries = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using PerQuery = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Chosen = nb::ndarray<bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ratio = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

class Scratch {
 public:
  // At least so many bytes, aligned to 64; what was there stays in them.
  void* hold(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_.reset(::operator new(bytes, std::align_val_t{64}));
      bytes_ = bytes;
    }
    return memory_.get();
  }
  void trim() {
    if (bytes_ > kKeptScratch) {
      memory_.reset();
      bytes_ = 0;
    }
  }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* at) const { ::operator delete(at, std::align_val_t{64}); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t bytes_ = 0;
};

// Time that is counted only while somebody asks for it. Of calls that run beside others, a thread's share counts.
class Clock {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void set(bool on) {
    nanoseconds_ = 0;
    on_ = on;
  }
  int64_t nanoseconds() const { return nanoseconds_; }

  template <class F>
  void around(F&& f) {
    if (!on()) return f();
    const auto began = std::chrono::steady_clock::now();
    f();
    const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - began;
    nanoseconds_ += spent.count() / (beside_others() ? std::max(threads(), 1) : 1);
  }

 private:
  std::atomic<bool> on_{false};
  std::atomic<int64_t> nanoseconds_{0};
};

class DigestStore {
 public:
  DigestStore(int layers, int heads, int head_dim, int page_size) : shape_{heads, page_size, head_dim} {
    require(layers >= 1 && layers <= 65536, is_not("layers", layers, "in 1..65536"));
    require(heads >= 1 && heads <= 65536, is_not("kv_heads", heads, "in 1..65536"));
    require(page_size == 8 || page_size == 16 || page_size == 32, is_not("page_size", page_size, "8, 16 or 32"));
    require(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0,
            is_not("head_dim", head_dim, "a multiple of 8 up to 256"));
    layers_.resize(static_cast<size_t>(layers));
  }

  int64_t capacity() const { return capacity_; }
  size_t page_bytes() const { return shape_.page_bytes(); }
  size_t nbytes() const {
    return layers_.size() * static_cast<size_t>(capacity_) * static_cast<size_t>(shape_.heads) * page_bytes();
  }
  size_t row_bytes() const { return layers_.size() * size(shape_.heads) * page_bytes(); }
  size_t scratch_nbytes() const { return scratch_.bytes(); }

  void grow(int64_t rows) {
    require(rows >= 0 && rows <= (int64_t{1} << 31), is_not("rows", rows, "in 0..2^31"));
    std::lock_guard lock(mutex_);
    if (rows <= capacity_) return;
    const int64_t wanted = std::max(rows, capacity_ + capacity_ / 8);
    for (auto& old : layers_) {  // layer by layer, so that memory never doubles
      auto made = std::make_unique<Region>(section(4, wanted));
      if (old)
        for (int i = 0; i < 4; ++i)
          std::copy_n(old->data() + section(i, capacity_), item_bytes(i) * pages(capacity_),
                      made->data() + section(i, wanted));
      old = std::move(made);
    }
    capacity_ = wanted;
  }

  void build(int layer, const Rows& rows, const Keys& keys) {
    const size_t shape[4] = {rows.shape(0), size(shape_.heads), size(shape_.page_size), size(shape_.head_dim)};
    for (size_t i = 0; i < 4; ++i)
      require(keys.shape(i) == shape[i], "keys: axis " + std::to_string(i) + " has " + std::to_string(keys.shape(i)) +
                                             " entries, not " + std::to_string(shape[i]));
    nb::gil_scoped_release released;
    std::lock_guard lock(mutex_);
    check(layer, rows.data(), static_cast<int64_t>(rows.shape(0)));
    digest().build(shape_, view(layer), rows.data(), keys.data(), static_cast<int64_t>(rows.shape(0)));
  }

  // All that rows hold, layer by layer, array by array.
  void dump(const Rows& rows, const Digests& digests) {
    each_piece(rows, digests.shape(0), digests.shape(1), digests.data(),
               [](uint8_t* outside, uint8_t* row, size_t bytes) { std::memcpy(outside, row, bytes); });
  }
  void load(const Rows& rows, const GivenDigests& digests) {
    each_piece(rows, digests.shape(0), digests.shape(1), digests.data(),
               [](const uint8_t* outside, uint8_t* row, size_t bytes) { std::memcpy(row, outside, bytes); });
  }

  float choose(int layer, const Rows& rows, const Queries& queries, const Rows& starts, const PerQuery& own_lse,
               int64_t start, float scale, std::optional<int64_t> window, std::optional<float> softcap, int64_t sample,
               int64_t room, int64_t sinks, int64_t recent, const Chosen& chosen, const Ratio& ratio) {
    const size_t n = rows.shape(0), heads = size(shape_.heads), query_heads = queries.shape(0);
    require(n >= 1, "rows: there are none to choose from");
    require(starts.shape(0) == n, "starts: not one for each of the rows");
    require(query_heads >= heads && query_heads % heads == 0 && query_heads <= 65536,
            is_not("queries: query heads", static_cast<int64_t>(query_heads), "a multiple of the KV heads"));
    require(queries.shape(1) >= 1 && queries.shape(1) <= 65536, "queries: not 1 to 65536 positions");
    require(queries.shape(2) == size(shape_.head_dim) && queries.stride(2) == 1, "queries: not head_dim numbers in a row");
    require(own_lse.shape(0) == query_heads && own_lse.shape(1) == queries.shape(1), "own_lse: not one for each query");
    require(chosen.shape(0) == heads && chosen.shape(1) == n, "chosen: not [kv_heads, pages]");
    require(ratio.shape(0) == heads && ratio.shape(1) == n, "ratio: not [kv_heads, pages]");
    require(!window || *window >= 1, "window: below 1");
    require(!softcap || *softcap > 0, "softcap: not above 0");
    require(sample >= 1 && sample <= 65536, is_not("sample", sample, "in 1..65536"));
    require(sinks >= 0 && recent >= 0, "sinks, recent: below 0");
    const int64_t pages = static_cast<int64_t>(n);
    require(room >= std::min(std::min(sinks, pages) + std::min(recent, pages), pages),
            is_not("room", room, "enough for the protected pages"));
    DigestChoice choice{
        shape_, {}, rows.data(), starts.data(), pages, queries.data(), queries.stride(0), queries.stride(1),
        own_lse.data(), static_cast<int>(query_heads / heads), static_cast<int64_t>(queries.shape(1)), start, sample,
        scale, softcap.value_or(0.0f), window.value_or(0), sinks, recent, room, nullptr,
        reinterpret_cast<uint8_t*>(chosen.data()), ratio.data(), 0};
    nb::gil_scoped_release released;
    choose_into(layer, choice);
    return choice.missed;
  }

  // As above with all but `layer` and `scratch` of the choice filled in and checked, its rows excepted. Without the GIL.
  void choose_into(int layer, DigestChoice& choice) {
    std::lock_guard lock(mutex_);
    choose_held(layer, choice, scratch_);
  }
  // For several threads at once, each with scratch of its own, while one holds the store.
  std::unique_lock<std::mutex> hold() { return std::unique_lock(mutex_); }
  void choose_held(int layer, DigestChoice& choice, Scratch& scratch) const {
    check(layer, choice.rows, choice.pages);
    choice.layer = view(layer);
    const DigestTable& kernel = digest();
    const Looks looks{choice.tokens, choice.sample, choice.group};
    choice.scratch = scratch.hold(kernel.scratch(shape_, choice.pages, looks.total()));
    clock_.around([&] { kernel.choose(choice); });
    scratch.trim();
  }

  // As `build`, for a caller that holds the store and has checked all; several threads at once, each other rows.
  void build_held(int layer, const int64_t* rows, const float* keys, int64_t count) const {
    clock_.around([&] { digest().build(shape_, view(layer), rows, keys, count); });
  }
  // Throws where the layer or a row is none of the store's.
  void check(int layer, const int64_t* rows, int64_t count) const {
    if (layer < 0 || layer >= static_cast<int>(layers_.size()))
      refuse(is_not("layer", layer, "in 0.." + std::to_string(layers_.size() - 1)));
    for (int64_t i = 0; i < count; ++i)
      if (rows[i] < 0 || rows[i] >= capacity_)
        refuse(is_not("rows", rows[i], "below " + std::to_string(capacity_)));
    if (capacity_ == 0) refuse("rows: the store has none yet");
  }

  const DigestShape& shape() const { return shape_; }
  Clock& clock() const { return clock_; }

 private:
  static size_t size(int value) { return static_cast<size_t>(value); }
  size_t pages(int64_t rows) const { return static_cast<size_t>(rows) * size(shape_.heads); }

  size_t item_bytes(int i) const {
    const size_t bytes[4] = {shape_.code_bytes(), size(shape_.head_dim), size(shape_.head_dim), 2 * sizeof(float)};
    return bytes[i];
  }
  template <class Byte, class Move>
  void each_piece(const Rows& rows, size_t count, size_t bytes, Byte* outside, Move&& move) {
    require(count == rows.shape(0) && bytes == row_bytes(), "digests: not [rows, " + std::to_string(row_bytes()) + "]");
    nb::gil_scoped_release released;
    std::lock_guard lock(mutex_);
    if (count) check(0, rows.data(), static_cast<int64_t>(count));
    for (size_t i = 0; i < count; ++i)
      for (const auto& layer : layers_)
        for (int array = 0; array < 4; ++array) {
          const size_t piece = item_bytes(array) * size(shape_.heads);
          move(outside, layer->data() + section(array, capacity_) + static_cast<size_t>(rows.data()[i]) * piece, piece);
          outside += piece;
        }
  }
  // Where array i begins, each aligned to 64; 4 gives the bytes of all.
  size_t section(int i, int64_t rows) const {
    size_t at = 0;
    for (int before = 0; before < i; ++before) at += (item_bytes(before) * pages(rows) + 63) / 64 * 64;
    return at;
  }

  DigestLayer view(int layer) const {
    uint8_t* data = layers_[static_cast<size_t>(layer)]->data();
    return {data, data + section(1, capacity_), reinterpret_cast<int8_t*>(data + section(2, capacity_)),
            reinterpret_cast<float*>(data + section(3, capacity_))};
  }

  DigestShape shape_;
  int64_t capacity_ = 0;
  std::vector<std::unique_ptr<Region>> layers_;
  Scratch scratch_;
  mutable Clock clock_;
  std::mutex mutex_;  // other threads may run while the GIL is released
};

}  // namespace kvpager
