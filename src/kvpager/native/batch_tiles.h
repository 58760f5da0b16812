// The tiles of one step in all layers of one window, checked, with the pages that each looks at. For bindings alone.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "arguments.h"
#include "digest_store.h"

namespace kvpager {


// Pages of a tile, sorted by head, then by position; `flat` are their places in the page table in layer 0.
struct Pages {
  std::vector<int64_t> flat, heads, blocks, starts, counts;

  int64_t count() const { return static_cast<int64_t>(flat.size()); }
  void clear() { flat.clear(), heads.clear(), blocks.clear(), starts.clear(), counts.clear(); }
};

struct Tile {
  int64_t token, tokens, start;      // first query among the batch's, how many, position of the first
  int64_t first, own, last, filled;  // blocks: of the window, of the tile, behind it; tokens written
  const int64_t* rows;               // of the sequence's blocks
  Pages mine, past;                  // past: empty where they are chosen
  bool choose;

  int64_t candidates() const { return own - first; }
};

// What a choice may take: see ports.Room. `pages` is -1 where nothing is ever chosen.
struct Budget {
  int64_t pages, sinks, recent, sample;
};

class Tiles {
 public:
  static constexpr int kFields = 8;

  Tiles(nb::handle rows, nb::handle tiles, nb::handle given, int64_t layers, int64_t kv_heads, int64_t page_size,
        int64_t group_pages, int64_t window, nb::tuple budget)
      : kv_heads_(kv_heads), page_size_(page_size), group_pages_(group_pages), window_(window),
        row_stride_(layers * kv_heads),
        budget_{nb::cast<int64_t>(budget[0]), nb::cast<int64_t>(budget[1]), nb::cast<int64_t>(budget[2]),
                nb::cast<int64_t>(budget[3])} {
    const Ints its_rows(rows, "rows", {-1}), fields(tiles, "tiles", {-1, kFields});
    require(layers >= 1 && kv_heads >= 1 && kv_heads <= 65536 && group_pages >= 1, "layers, kv_heads, group_pages: below 1");
    require(page_size >= 1 && page_size <= 65536, is_not("page_size", page_size, "in 1..65536"));
    require(window >= 0 && window < kMost, is_not("window", window, "in 0..2^48"));
    require(budget_.pages < 0 || (budget_.sinks >= 0 && budget_.recent >= 0 && budget_.sample >= 1 &&
                                  budget_.sample <= 65536 && budget_.sinks + budget_.recent <= budget_.pages),
            is_not("budget", budget_.pages, "enough for the protected pages"));
    rows_.assign(its_rows.data(), its_rows.data() + its_rows.size(0));
    for (const int64_t row : rows_) {
      require(row >= 0 && row < kMost, is_not("rows", row, "a row"));
      most_row_ = std::max(most_row_, row);
    }
    require(fields.size(0) >= 1, "tiles: there are none");
    tiles_.resize(static_cast<size_t>(fields.size(0)));
    for (size_t i = 0; i < tiles_.size(); ++i) read(tiles_[i], fields.data() + i * kFields);
    if (!given.is_none()) take(nb::cast<nb::tuple>(given));
    for (const Tile& tile : tiles_) {
      pages_ += tile.mine.count() + (tile.choose ? budget_.pages * kv_heads_ : tile.past.count());
      if (tile.choose) ratios_ += tile.candidates() * kv_heads_;
    }
  }
  Tiles(const Tiles&) = delete;

  std::vector<Tile>& tiles() { return tiles_; }
  int64_t kv_heads() const { return kv_heads_; }
  int64_t page_size() const { return page_size_; }
  int64_t group_pages() const { return group_pages_; }
  int64_t window() const { return window_; }
  int64_t row_stride() const { return row_stride_; }
  int64_t tokens() const { return tokens_; }
  int64_t most_row() const { return most_row_; }
  const Budget& budget() const { return budget_; }
  int64_t pages() const { return pages_; }    // of all tiles together, at most
  int64_t ratios() const { return ratios_; }  // candidates of all tiles that choose, all heads

  // Scratch that one batch at a time uses, at least so many floats; kept, for all layers need as much.
  float* scratch(size_t floats) {
    if (floats > scratch_floats_) {
      scratch_.reset();
      scratch_.reset(new float[floats]);
      scratch_floats_ = floats;
    }
    return scratch_.get();
  }
  bool busy = false;

  void place(const Tile& tile, int64_t head, int64_t block, Pages& to) const {
    const int64_t start = block * page_size_;
    to.flat.push_back(tile.rows[block] * row_stride_ + head);
    to.heads.push_back(head);
    to.blocks.push_back(block);
    to.starts.push_back(start);
    to.counts.push_back(std::min(tile.filled - start, page_size_));
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 40;

  void read(Tile& tile, const int64_t* from) {
    for (int i = 0; i < kFields; ++i)
      if (from[i] < 0 || from[i] >= kMost) require(false, is_not("tiles", from[i], "a position"));
    const int64_t block0 = from[3];
    tile.token = from[0], tile.tokens = from[1], tile.start = from[2];
    tile.first = from[4], tile.own = from[5], tile.last = from[6], tile.filled = from[7];
    require(tile.tokens >= 1 && tile.tokens <= 65536, is_not("tiles: tokens", tile.tokens, "in 1..65536"));
    require(tile.first <= tile.own && tile.own < tile.last &&
                block0 + tile.last <= static_cast<int64_t>(rows_.size()) && tile.own == tile.start / page_size_ &&
                (tile.last - 1) * page_size_ < tile.filled && tile.start + tile.tokens <= tile.filled,
            "tiles: blocks that don't belong to the positions");
    tokens_ = std::max(tokens_, tile.token + tile.tokens);
    tile.rows = rows_.data() + block0;
    tile.choose = budget_.pages >= 0 && tile.candidates() > budget_.pages;
    fill(tile, tile.own, tile.last, tile.mine);
    if (!tile.choose) fill(tile, tile.first, tile.own, tile.past);
  }

  void fill(const Tile& tile, int64_t first, int64_t stop, Pages& to) const {
    for (int64_t head = 0; head < kv_heads_; ++head)
      for (int64_t block = first; block < stop; ++block) place(tile, head, block, to);
  }

  // The past pages of a single tile, said one by one: heads and blocks.
  void take(const nb::tuple& given) {
    require(tiles_.size() == 1, "given: pages of one tile alone");
    Tile& tile = tiles_[0];
    const Ints heads(given[0], "given heads", {-1}), blocks(given[1], "given blocks", {heads.size(0)});
    tile.past.clear();
    tile.choose = false;
    for (int64_t i = 0; i < heads.size(0); ++i) {
      const int64_t head = heads.data()[i], block = blocks.data()[i];
      require(head >= (i ? heads.data()[i - 1] : 0) && head < kv_heads_, is_not("given heads", head, "in order"));
      require(block >= tile.first && block < tile.own, is_not("given blocks", block, "before the tile"));
      place(tile, head, block, tile.past);
    }
  }

  int64_t kv_heads_, page_size_, group_pages_, window_, row_stride_;
  Budget budget_;
  std::vector<int64_t> rows_;
  std::vector<Tile> tiles_;
  int64_t most_row_ = 0, tokens_ = 0, pages_ = 0, ratios_ = 0;
  std::unique_ptr<float[]> scratch_;
  size_t scratch_floats_ = 0;
};

}  // namespace kvpager
