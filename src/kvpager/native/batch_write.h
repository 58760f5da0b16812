// New keys and values of a whole step into the pages of one layer. For bindings alone.
#pragma once

#include <vector>

#include "batch_tiles.h"
#include "frames.h"
#include "states.h"
#include "threads.h"

namespace kvpager {

// Where pieces of a step's tokens go: row of the page table, offset in the page, first token, tokens.
struct Piece {
  int64_t row, offset, token, tokens;
};

class Writer {
 public:
  Writer(Frames& frames, const int32_t* table, int64_t row_stride, int64_t first_page, int64_t kv_heads)
      : frames_(frames), table_(table), row_stride_(row_stride), first_page_(first_page), heads_(kv_heads) {}

  // Frames of a row's pages, all heads; throws where one has none.
  void find(int64_t row, int64_t* to) const {
    for (int64_t head = 0; head < heads_; ++head) {
      to[head] = table_[row * row_stride_ + first_page_ + head];
      require(to[head] >= 0 && to[head] < frames_.count(), "table: a page that is written has no frame");
    }
  }

  void write(const std::vector<Piece>& pieces, const States& keys, const States& values) const {
    const Layout& layout = frames_.layout();
    const size_t total = pieces.size() * static_cast<size_t>(heads_);
    std::vector<int64_t> at(total), slots(total, -1);
    int64_t numbers = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      int64_t* to = at.data() + i * static_cast<size_t>(heads_);
      find(piece.row, to);
      frames_.slots_to_write(to, heads_, piece.offset, piece.tokens, slots.data() + i * static_cast<size_t>(heads_));
      numbers += piece.tokens * heads_ * layout.head_dim;
    }
    const nb::gil_scoped_release release;
    const FrameView view = frames_.view();
    auto one = [&](int64_t item) {
      const Piece& piece = pieces[static_cast<size_t>(item / heads_)];
      const int64_t head = item % heads_;
      alignas(64) float rows[2][32 * 256];
      for (int64_t t = 0; t < piece.tokens; ++t) {
        keys.read(head, piece.token + t, rows[0] + t * layout.head_dim);
        values.read(head, piece.token + t, rows[1] + t * layout.head_dim);
      }
      const size_t index = static_cast<size_t>(item);
      pages().write({view, &at[index], &slots[index], 1, piece.offset, piece.tokens, rows[0], rows[1]});
    };
    if (numbers < kSmall)
      for (int64_t i = 0; i < static_cast<int64_t>(total); ++i) one(i);
    else
      parallel(static_cast<int64_t>(total), [&](int64_t i, int) { one(i); });
  }

  // The digests of rows that are full, from the keys as they are stored: attention will see those.
  void summarise(DigestStore& store, int layer, const int64_t* rows, int64_t count) const {
    const Layout& layout = frames_.layout();
    const size_t pages_count = static_cast<size_t>(count * heads_);
    std::vector<int64_t> at(pages_count), slots(pages_count, -1);
    for (int64_t i = 0; i < count; ++i) find(rows[i], at.data() + i * heads_);
    const nb::gil_scoped_release release;
    const auto held = store.hold();
    store.check(layer, rows, count);
    const FrameView view = frames_.view();
    const size_t floats = static_cast<size_t>(heads_ * layout.page_size * layout.head_dim);
    auto one = [&](int64_t i) {
      thread_local std::vector<float> numbers;  // of one row: a bounded size
      if (numbers.size() < 2 * floats) numbers.resize(2 * floats);
      float *keys = numbers.data(), *values = keys + floats;
      pages().read({view, at.data() + i * heads_, slots.data() + i * heads_, heads_, 0, layout.page_size, keys, values});
      store.build_held(layer, rows + i, keys, 1);
    };
    if (static_cast<int64_t>(floats) * count < kSmall)
      for (int64_t i = 0; i < count; ++i) one(i);
    else
      parallel(count, [&](int64_t i, int) { one(i); });
  }

 private:
  static constexpr int64_t kSmall = 1 << 15;  // numbers, below which waking other threads costs more

  Frames& frames_;
  const int32_t* table_;
  int64_t row_stride_, first_page_, heads_;
};

inline void write_tokens(Frames& frames, nb::handle table, int64_t layer, int64_t layers, int64_t kv_heads,
                         nb::handle pieces, nb::handle keys, nb::handle values, nb::object digest, nb::handle full) {
  const Array<const int32_t> places(table, "table", {-1});
  const Ints parts(pieces, "pieces", {-1, 4}), rows(full, "full", {-1});
  const int64_t size = frames.layout().page_size;
  require(layers >= 1 && kv_heads >= 1 && kv_heads <= 65536 && layer >= 0 && layer < layers, "layer, kv_heads: no such");
  const States new_keys(keys, "keys", kv_heads, -1, frames.layout().head_dim);
  const States new_values(values, "values", kv_heads, new_keys.tokens(), frames.layout().head_dim);
  const int64_t stride = layers * kv_heads, most = places.size(0) / stride;
  std::vector<Piece> checked;
  for (int64_t i = 0; i < parts.size(0); ++i) {
    const int64_t* from = parts.data() + 4 * i;
    const Piece piece{from[0], from[1], from[2], from[3]};
    require(piece.row >= 0 && piece.row < most, is_not("pieces: row", piece.row, "in the table"));
    require(piece.offset >= 0 && piece.tokens >= 1 && piece.tokens <= size && piece.offset <= size - piece.tokens &&
                piece.token >= 0 && piece.token <= new_keys.tokens() - piece.tokens,
            "pieces: tokens that no page holds, or that there are not");
    checked.push_back(piece);
  }
  for (int64_t i = 0; i < rows.size(0); ++i)
    require(rows.data()[i] >= 0 && rows.data()[i] < most, is_not("full", rows.data()[i], "in the table"));
  const Writer writer(frames, places.data(), stride, layer * kv_heads, kv_heads);
  writer.write(checked, new_keys, new_values);
  if (!digest.is_none() && rows.size(0) > 0) {
    auto& store = *nb::cast<DigestStore*>(digest);
    require(store.shape().heads == kv_heads && store.shape().page_size == size &&
                store.shape().head_dim == frames.layout().head_dim,
            "digest: of another shape");
    writer.summarise(store, static_cast<int>(layer), rows.data(), rows.size(0));
  }
}

}  // namespace kvpager
