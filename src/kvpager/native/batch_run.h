// One tile of one layer, group by group as its pages lie in frames: its own pages, the choice among the past ones,
// those, and the joining. The same kernels in the same order however the pages come. For bindings alone.
#pragma once

#include <atomic>
#include <cmath>
#include <exception>
#include <new>
#include <vector>

#include "attention.h"
#include "batch_tiles.h"
#include "states.h"
#include "threads.h"

namespace kvpager {

KV_DECLARE_TABLE(AttentionTable, attention)

// Where a layer's tiles find what they need; the same for all of them.
struct LayerView {
  FrameView view;
  const int32_t* table;  // frames by page
  int64_t offset;        // of the layer's pages in it
  const States* queries;
  const States* output;
  int64_t query_heads, dim;
  float scale, softcap;
  DigestStore* store;  // null where nothing is chosen
  int layer;
};

class TileRun {
 public:
  TileRun(const Tiles& tiles, const Tile& tile, const LayerView& layer)
      : tiles_(&tiles), tile_(&tile), layer_(&layer), group_(layer.query_heads / tiles.kv_heads()),
        rows_(layer.query_heads * tile.tokens) {}

  // Floats of scratch that it needs at most: its queries, and the partial results of all groups.
  static size_t floats(const Tiles& tiles, const Tile& tile, int64_t query_heads, int64_t dim) {
    const int64_t rows = query_heads * tile.tokens, group = query_heads / tiles.kv_heads();
    const int64_t past = tile.choose ? tiles.budget().pages * tiles.kv_heads() : tile.past.count();
    const int64_t groups = ceil_div(tile.mine.count(), tiles.group_pages()) + ceil_div(past, tiles.group_pages());
    return static_cast<size_t>(rows * dim * 2 + groups * rows * (dim + 1) +
                               (tile.mine.count() + past) * (group * tile.tokens + 4) + rows);
  }

  // About the time that it takes, in any unit.
  int64_t cost() const {
    const int64_t past = tile_->choose ? tiles_->budget().pages * tiles_->kv_heads() + tile_->candidates() / 8
                                       : tile_->past.count();
    return (tile_->mine.count() + past) * (tile_->tokens + 4);
  }

  void use(float* scratch) { scratch_ = scratch; }
  bool done() const { return done_; }

  // Goes on as far as resident pages allow; throws std::bad_alloc.
  void advance() {
    if (done_) return;
    if (parts_.empty()) begin();
    if (!chosen_) {
      if (!attend(tile_->mine, mine_)) return;
      if (tile_->choose) choose();
      open(past(), past_);
      chosen_ = true;
    }
    if (!attend(past(), past_)) return;
    settle();
    done_ = true;
  }

  // Calls f(pages, first, count) for each group of pages that it waits for, in order, until f says false.
  template <class F>
  bool each_wanted(F&& f) {
    if (done_) return true;
    Span& span = chosen_ ? past_ : mine_;
    const Pages& pages = chosen_ ? past() : tile_->mine;
    for (size_t i = 0; i < span.groups.size(); ++i)
      if (!span.groups[i].done && !f(pages, span.groups[i].first, span.groups[i].count)) return false;
    return true;
  }
  // Notes that a page that it waits for was absent.
  void came_back(const Pages& pages, int64_t index) {
    if (recalled_.empty()) recalled_.resize(static_cast<size_t>(most_pages()));
    recalled_[static_cast<size_t>(index + (&pages == &tile_->mine ? 0 : tile_->mine.count()))] = 1;
  }

  const Tile& tile() const { return *tile_; }
  const Pages& past() const { return tile_->choose ? picked_ : tile_->past; }
  int64_t pages() const { return tile_->mine.count() + past().count(); }
  const float* masses() const { return masses_; }  // [4][pages]
  const std::vector<uint8_t>& recalled() const { return recalled_; }
  const std::vector<float>& ratio() const { return ratio_; }
  float missed() const { return missed_; }

 private:
  struct Group {
    int64_t first, count;
    size_t part;
    bool done;
  };
  struct Span {
    std::vector<Group> groups;
    std::vector<int64_t> frames;
  };

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t most_pages() const {
    return tile_->mine.count() + (tile_->choose ? tiles_->budget().pages * tiles_->kv_heads() : tile_->past.count());
  }
  float* take(int64_t floats) {
    float* at = scratch_;
    scratch_ += floats;
    return at;
  }

  void begin() {
    queries_ = take(rows_ * layer_->dim);
    float* to = queries_;
    for (int64_t head = 0; head < layer_->query_heads; ++head)
      for (int64_t token = 0; token < tile_->tokens; ++token, to += layer_->dim)
        layer_->queries->read(head, tile_->token + token, to);
    open(tile_->mine, mine_);
  }

  void open(const Pages& pages, Span& span) {
    const int64_t most = tiles_->group_pages();
    span.frames.assign(static_cast<size_t>(pages.count()), -1);
    for (int64_t first = 0; first < pages.count(); first += most) {
      const int64_t count = std::min(most, pages.count() - first);
      span.groups.push_back({first, count, parts_.size(), false});
      float* output = take(rows_ * layer_->dim);
      float* lse = take(rows_);
      parts_.push_back({output, lse, take(count * group_ * tile_->tokens), count});
    }
  }

  // Attends to groups that are all in frames; says whether none is left.
  bool attend(const Pages& pages, Span& span) {
    std::vector<AttendArgs> calls;
    bool all = true;
    for (Group& group : span.groups) {
      if (group.done) continue;
      int64_t* frames = span.frames.data() + group.first;
      bool here = true;
      for (int64_t i = 0; i < group.count && here; ++i) {
        frames[i] = layer_->table[pages.flat[static_cast<size_t>(group.first + i)] + layer_->offset];
        here = frames[i] >= 0;
      }
      if (!here) {
        all = false;
        continue;
      }
      const SettlePart& part = parts_[group.part];
      calls.push_back({layer_->view, frames, pages.heads.data() + group.first, pages.starts.data() + group.first,
                       pages.counts.data() + group.first, group.count, 0, tiles_->kv_heads(), group_, tile_->tokens,
                       queries_, tile_->start, tiles_->window(), layer_->scale, layer_->softcap,
                       const_cast<float*>(part.output), const_cast<float*>(part.lse),
                       const_cast<float*>(part.page_lse)});
      group.done = true;
    }
    // Whole groups side by side: a group's own units would have the threads meet after every one. What is left over
    // when each thread has had as many as the others is cut into units again.
    const size_t workers = static_cast<size_t>(std::max(threads(), 1));
    const size_t together = workers > 1 && calls.size() >= 2 * workers ? calls.size() / workers * workers : 0;
    // Several to a thread, one after the other: what one fetches ahead is the next one's.
    const size_t run = std::max<size_t>(together / (4 * workers), 1);
    for (size_t i = 1; i < calls.size(); ++i)
      if (calls[i].frames == calls[i - 1].frames + calls[i - 1].pages && (i % run != 0 || i >= together))
        calls[i - 1].after = calls[i].pages;
    std::atomic<bool> room{true};
    if (together > 0)
      parallel(static_cast<int64_t>((together + run - 1) / run), [&](int64_t r, int) {
        const size_t first = static_cast<size_t>(r) * run;
        for (size_t i = first; i < std::min(first + run, together); ++i)
          if (!attention().attend(calls[i])) room = false;
      });
    for (size_t i = together; i < calls.size(); ++i)
      if (!attention().attend(calls[i])) room = false;
    if (!room) throw std::bad_alloc();
    return all;
  }

  // What its own pages give each query, over all groups of them.
  const float* own_lse() {
    if (parts_.size() == 1) return parts_[0].lse;
    joined_.resize(static_cast<size_t>(rows_));
    for (int64_t row = 0; row < rows_; ++row) {
      float top = -INFINITY, total = 0;
      for (const SettlePart& part : parts_) top = std::max(top, part.lse[row]);
      for (const SettlePart& part : parts_) total += top == -INFINITY ? 0 : std::exp(part.lse[row] - top);
      joined_[static_cast<size_t>(row)] = total > 0 ? top + std::log(total) : -INFINITY;
    }
    return joined_.data();
  }

  void choose() {
    const Budget& budget = tiles_->budget();
    const int64_t n = tile_->candidates(), heads = tiles_->kv_heads(), size = tiles_->page_size();
    std::vector<uint8_t> flags(static_cast<size_t>(heads * n));
    std::vector<int64_t> starts(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) starts[static_cast<size_t>(i)] = (tile_->first + i) * size;
    ratio_.resize(static_cast<size_t>(heads * n));
    const int64_t sinks = std::min(std::max(budget.sinks - tile_->first, int64_t{0}), n);
    DigestChoice choice{layer_->store->shape(), {}, tile_->rows + tile_->first, starts.data(), n, queries_,
                        tile_->tokens * layer_->dim, layer_->dim, own_lse(), static_cast<int>(group_), tile_->tokens,
                        tile_->start, budget.sample, layer_->scale, layer_->softcap, tiles_->window(), sinks,
                        budget.recent, budget.pages, nullptr, flags.data(), ratio_.data(), 0};
    thread_local Scratch scratch;
    layer_->store->choose_held(layer_->layer, choice, scratch);
    missed_ = choice.missed;
    // scores beyond float32 make estimates that are no numbers, and those choose fewer pages
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < n; ++i)
        if (flags[static_cast<size_t>(head * n + i)]) tiles_->place(*tile_, head, tile_->first + i, picked_);
  }

  void settle() {
    std::vector<int64_t> heads(tile_->mine.heads);
    heads.insert(heads.end(), past().heads.begin(), past().heads.end());
    masses_ = take(4 * pages());
    float* output = parts_.size() > 1 ? take(rows_ * layer_->dim) : nullptr;
    SettleArgs args{parts_.data(), static_cast<int64_t>(parts_.size()), heads.data(), tiles_->kv_heads(), group_,
                    tile_->tokens, layer_->dim, output, masses_, pages()};
    if (!attention().settle(args)) throw std::bad_alloc();
    const float* from = output ? output : parts_[0].output;
    for (int64_t head = 0; head < layer_->query_heads; ++head)
      for (int64_t token = 0; token < tile_->tokens; ++token, from += layer_->dim)
        layer_->output->write(head, tile_->token + token, from);
  }

  const Tiles* tiles_;
  const Tile* tile_;
  const LayerView* layer_;
  int64_t group_, rows_;
  float* scratch_ = nullptr;
  float* queries_ = nullptr;
  float* masses_ = nullptr;
  std::vector<SettlePart> parts_;
  Span mine_, past_;
  Pages picked_;
  std::vector<float> joined_, ratio_;
  std::vector<uint8_t> recalled_;
  float missed_ = 0;
  bool chosen_ = false, done_ = false;
};

}  // namespace kvpager
