#include "frames.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "isa.h"
#include "pages.h"

namespace kvpager {

KV_DECLARE_TABLE(PagesTable, pages)

namespace {

Layout checked(const std::string& dtype, int64_t page_size, int64_t head_dim) {
  if (page_size != 8 && page_size != 16 && page_size != 32)
    throw std::invalid_argument("page_size: " + std::to_string(page_size) + " is not 8, 16 or 32");
  if (head_dim < 8 || head_dim > 256 || head_dim % 8)
    throw std::invalid_argument("head_dim: " + std::to_string(head_dim) + " is not a multiple of 8 up to 256");
  const char* names[] = {"float32", "float16", "bfloat16", "int8"};
  for (int i = 0; i < 4; ++i)
    if (dtype == names[i]) return Layout::of(static_cast<DType>(i), static_cast<int>(page_size), static_cast<int>(head_dim));
  throw std::invalid_argument("dtype: '" + dtype + "' is not float32, float16, bfloat16 or int8");
}

// Keys and values of one token of a page in its frame, items of `size` bytes of which `pair` lie together.
void gather(const Layout& l, int64_t size, int64_t pair, const uint8_t* page, int64_t token, uint8_t* out) {
  const int64_t dim = l.head_dim, block = l.block;
  const uint8_t* key = page + (token / block * dim * block + token % block * pair) * size;
  for (int64_t c = 0; c < dim; c += pair, key += block * pair * size) std::memcpy(out + c * size, key, pair * size);
  const uint8_t* value = page + l.values + (token / pair * dim * pair + token % pair) * size;
  for (int64_t c = 0; c < dim; ++c) std::memcpy(out + (dim + c) * size, value + c * pair * size, size);
}

}  // namespace

Frames::Frames(int64_t count, const std::string& dtype, int64_t page_size, int64_t head_dim)
    : count_(count), layout_(checked(dtype, page_size, head_dim)) {
  if (count < 1 || count > (int64_t{1} << 31) - 1)
    throw std::invalid_argument("frames: " + std::to_string(count) + " is not in 1..2147483647");
  region_ = std::make_unique<Region>(static_cast<size_t>(count) * layout_.page_bytes);
  if (coded()) {
    staged_.assign(static_cast<size_t>(count), -1);
    slabs_.assign(static_cast<size_t>((count + kSlab - 1) / kSlab), nullptr);
  }
}

FrameView Frames::view() { return {layout_, region_->data(), staged_.data(), slabs_.data()}; }

int64_t Frames::nbytes() const {
  return count_ * static_cast<int64_t>(layout_.page_bytes) +
         static_cast<int64_t>(owned_.size()) * kSlab * slot_floats() * static_cast<int64_t>(sizeof(float)) +
         static_cast<int64_t>(staged_.size() * sizeof(int32_t) + slabs_.size() * sizeof(float*));
}

int32_t Frames::take(int64_t frame) {
  int32_t& held = staged_[static_cast<size_t>(frame)];
  if (held >= 0) return held;
  if (free_.empty()) {
    const auto first = static_cast<int32_t>(static_cast<int64_t>(owned_.size()) * kSlab);
    owned_.push_back(std::make_unique<float[]>(static_cast<size_t>(kSlab * slot_floats())));
    slabs_[owned_.size() - 1] = owned_.back().get();
    free_.reserve(static_cast<size_t>(first + kSlab));
    for (int32_t i = kSlab - 1; i >= 0; --i) free_.push_back(first + i);
  }
  held = free_.back();
  free_.pop_back();
  return held;
}

void Frames::slots_to_write(const int64_t* frames, int64_t pages, int64_t offset, int64_t tokens, int64_t* slots) {
  if (!coded()) return;
  if (offset == 0 && tokens == layout_.page_size) {
    finish(frames, pages);
    std::fill(slots, slots + pages, -1);
    return;
  }
  for (int64_t i = 0; i < pages; ++i) {
    const bool fresh = staged_[static_cast<size_t>(frames[i])] < 0;
    slots[i] = take(frames[i]);
    if (fresh && offset > 0) {
      // a full page that was cut, and goes on
      const int64_t none = -1;
      float* to = view().slot(slots[i]);
      kvpager::pages().read({view(), frames + i, &none, 1, 0, layout_.page_size, to, to + slot_floats() / 2});
    }
  }
}

void Frames::slots_to_read(const int64_t* frames, const int64_t* counts, int64_t pages, int64_t* slots) const {
  if (!coded()) return;
  for (int64_t i = 0; i < pages; ++i)
    slots[i] = counts && counts[i] < layout_.page_size ? staged_[static_cast<size_t>(frames[i])] : -1;
}

void Frames::copy_slots(const int64_t* from, const int64_t* to, int64_t pages) {
  if (!coded()) return;
  finish(to, pages);
  for (int64_t i = 0; i < pages; ++i) {
    const int32_t source = staged_[static_cast<size_t>(from[i])];
    if (source >= 0)
      std::memcpy(view().slot(take(to[i])), view().slot(source), static_cast<size_t>(slot_floats()) * sizeof(float));
  }
}

void Frames::finish(const int64_t* frames, int64_t pages) {
  if (!coded()) return;
  for (int64_t i = 0; i < pages; ++i) {
    int32_t& held = staged_[static_cast<size_t>(frames[i])];
    if (held >= 0) free_.push_back(held);
    held = -1;
  }
}

void Frames::held(const int64_t* frames, int64_t pages, uint8_t* held) const {
  for (int64_t i = 0; i < pages; ++i) held[i] = coded() && staged_[static_cast<size_t>(frames[i])] >= 0;
}

int64_t Frames::token_bytes() const {
  const bool wide = layout_.dtype == DType::float32 || layout_.dtype == DType::int8;
  return int64_t{2} * layout_.head_dim * (wide ? 4 : 2);
}

void Frames::tokens(const int64_t* frames, const int64_t* offsets, int64_t pages, uint8_t* out) {
  const int64_t bytes = token_bytes(), dim = layout_.head_dim;
  std::vector<float> plain(coded() ? static_cast<size_t>(slot_floats()) : 0);
  for (int64_t i = 0; i < pages; ++i, out += bytes) {
    if (coded()) {
      const int32_t held = staged_[static_cast<size_t>(frames[i])];
      const float* keys = held >= 0 ? view().slot(held) : plain.data();
      if (held < 0) {  // a full page that was cut: the numbers that its codes stand for
        const int64_t none = -1;
        float* to = plain.data();
        kvpager::pages().read({view(), frames + i, &none, 1, 0, layout_.page_size, to, to + slot_floats() / 2});
      }
      std::memcpy(out, keys + offsets[i] * dim, static_cast<size_t>(bytes / 2));
      std::memcpy(out + bytes / 2, keys + slot_floats() / 2 + offsets[i] * dim, static_cast<size_t>(bytes / 2));
      continue;
    }
    const uint8_t* page = view().frames + frames[i] * static_cast<int64_t>(layout_.page_bytes);
    switch (layout_.dtype) {
      case DType::float32: gather(layout_, 4, 1, page, offsets[i], out); break;
      case DType::float16: gather(layout_, 2, 1, page, offsets[i], out); break;
      default: gather(layout_, 2, 2, page, offsets[i], out);
    }
  }
}

}  // namespace kvpager
