// All tiles of a step in one layer, a ragged batch: new tokens into their pages, and attention, each in one call where
// all pages lie in frames, and in waves where some have to be brought back.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "batch_run.h"
#include "batch_write.h"
#include "frames.h"

namespace kvpager {

namespace {

constexpr size_t kScratchFloats = size_t{4} << 20;  // of tiles that are worked on together, unless one needs more

// Calls f(i) for every item; what one of them throws, in whichever thread, is thrown again here.
template <class F>
void parallel_checked(int64_t items, F&& f) {
  std::mutex mutex;
  std::exception_ptr problem;
  parallel(items, [&](int64_t i, int) {
    try {
      f(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      problem = std::current_exception();
    }
  });
  if (problem) std::rethrow_exception(problem);
}

// Arrays that Python made for what a batch gives; sizes as Tiles.pages and Tiles.ratios say.
struct Results {
  Array<int64_t> offsets, rows, heads, blocks;
  Array<uint8_t> recalled;
  Array<float> masses, ratios, missed;

  Results(const nb::tuple& from, int64_t tiles, int64_t pages, int64_t candidates)
      : offsets(from[0], "offsets", {tiles + 1}), rows(from[1], "rows", {pages}), heads(from[2], "heads", {pages}),
        blocks(from[3], "blocks", {pages}), recalled(from[4], "recalled", {pages}), masses(from[5], "masses", {4, pages}),
        ratios(from[6], "ratios", {candidates}), missed(from[7], "missed", {tiles}) {}
};

class Batch {
 public:
  Batch(Tiles& tiles, Frames& frames, nb::handle table, int64_t layer, nb::object digest, nb::handle queries,
        double scale, double softcap, nb::handle output, nb::tuple results)
      : tiles_(tiles), table_(table, "table", {-1}),
        queries_(queries, "queries", -1, -1, frames.layout().head_dim),
        output_(output, "output", queries_.heads(), queries_.tokens(), frames.layout().head_dim, true),
        results_(results, static_cast<int64_t>(tiles.tiles().size()), tiles.pages(), tiles.ratios()) {
    const int64_t kv_heads = tiles.kv_heads(), query_heads = queries_.heads();
    require(frames.layout().page_size == tiles.page_size(), "frames: of another page size");
    require(queries_.tokens() >= tiles.tokens(), is_not("queries: tokens", queries_.tokens(), "those of the tiles"));
    require(query_heads % kv_heads == 0 && query_heads <= 65536,
            is_not("queries: query heads", query_heads, "a multiple of the KV heads"));
    require(layer >= 0 && (layer + 1) * kv_heads <= tiles.row_stride(), is_not("layer", layer, "a layer"));
    require((tiles.most_row() + 1) * tiles.row_stride() <= table_.size(0), "table: it lacks rows of the tiles");
    require(std::isfinite(scale) && std::isfinite(softcap) && softcap >= 0, "scale, softcap: not finite numbers");
    DigestStore* store = digest.is_none() ? nullptr : nb::cast<DigestStore*>(digest);
    require(store || tiles.ratios() == 0, "digest: tiles choose, and there is none");
    if (store) {
      const DigestShape& shape = store->shape();
      require(shape.heads == kv_heads && shape.page_size == tiles.page_size() &&
                  shape.head_dim == frames.layout().head_dim,
              "digest: of another shape");
    }
    require(!tiles.busy, "tiles: another batch of them is not done");
    view_ = {frames.view(), table_.data(), layer * kv_heads, &queries_, &output_, query_heads,
             frames.layout().head_dim, static_cast<float>(scale), static_cast<float>(softcap), store,
             static_cast<int>(layer)};
    runs_.reserve(tiles.tiles().size());
    for (const Tile& tile : tiles.tiles()) runs_.emplace_back(tiles, tile, view_);
    tiles_.busy = true;
  }
  ~Batch() { tiles_.busy = false; }
  Batch(const Batch&) = delete;

  // The pages that are wanted next, as many groups of them as `room` frames hold and one at least, and those after
  // them; or None when all is done.
  nb::object advance(int64_t room) {
    std::vector<int64_t> wanted, later;
    {
      const nb::gil_scoped_release release;
      while (at_ < runs_.size()) {
        if (stop_ <= at_) open();
        go_on();
        gather(room, wanted, later);
        if (!wanted.empty()) break;
        for (; at_ < stop_; ++at_) finish(at_);
      }
    }
    if (wanted.empty()) return nb::none();
    return nb::make_tuple(array(std::move(wanted)), array(std::move(later)));
  }

 private:
  using Numbers = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

  static Numbers array(std::vector<int64_t>&& numbers) {
    auto* held = new std::vector<int64_t>(std::move(numbers));
    nb::capsule owner(held, [](void* at) noexcept { delete static_cast<std::vector<int64_t>*>(at); });
    return {held->data(), {held->size()}, owner};
  }

  size_t floats(size_t i) const {
    return TileRun::floats(tiles_, tiles_.tiles()[i], view_.query_heads, view_.dim);
  }

  // Takes on as many of the tiles that are left as the scratch holds, one at least.
  void open() {
    size_t total = floats(at_);
    for (stop_ = at_ + 1; stop_ < runs_.size() && total + floats(stop_) <= kScratchFloats; ++stop_)
      total += floats(stop_);
    float* scratch = tiles_.scratch(total);
    for (size_t i = at_; i < stop_; ++i) {
      runs_[i].use(scratch);
      scratch += floats(i);
    }
  }

  // Lets every tile go on as far as it can: small ones side by side, those that are more than a thread's share with all
  // threads in each. Neither changes what is computed.
  void go_on() {
    std::vector<TileRun*> open;
    int64_t total = 0;
    for (size_t i = at_; i < stop_; ++i)
      if (!runs_[i].done()) {
        open.push_back(&runs_[i]);
        total += runs_[i].cost();
      }
    std::unique_lock<std::mutex> held;
    if (view_.store) held = view_.store->hold();
    std::stable_sort(open.begin(), open.end(), [](auto* a, auto* b) { return a->cost() > b->cost(); });
    const int64_t workers = std::max(threads(), 1);
    size_t first = 0;
    while (first < open.size() && open[first]->cost() * workers > total) open[first++]->advance();
    const size_t few = static_cast<size_t>(workers), left = open.size() - first;
    const size_t together = left >= 2 * few ? left : left / few * few;
    parallel_checked(static_cast<int64_t>(together), [&](int64_t i) { open[first + static_cast<size_t>(i)]->advance(); });
    for (size_t i = first + together; i < open.size(); ++i) open[i]->advance();
  }

  void gather(int64_t room, std::vector<int64_t>& wanted, std::vector<int64_t>& later) {
    std::unordered_set<int64_t> pages;
    for (size_t i = at_; i < stop_ && later.empty(); ++i)
      runs_[i].each_wanted([&](const Pages& from, int64_t first, int64_t count) {
        std::vector<int64_t> fresh;
        for (int64_t p = first; p < first + count; ++p) {
          const int64_t page = from.flat[static_cast<size_t>(p)] + view_.offset;
          if (!pages.count(page)) fresh.push_back(page);
        }
        if (!pages.empty() && static_cast<int64_t>(pages.size() + fresh.size()) > room) {
          later = fresh;
          return false;
        }
        for (int64_t p = first; p < first + count; ++p) {
          const int64_t page = from.flat[static_cast<size_t>(p)] + view_.offset;
          if (pages.insert(page).second) {
            wanted.push_back(page);
            if (view_.table[page] < 0) runs_[i].came_back(from, p);
          }
        }
        return true;
      });
  }

  void finish(size_t i) {
    const TileRun& run = runs_[i];
    const Tile& tile = run.tile();
    const int64_t pages = run.pages(), most = tiles_.pages();
    int64_t* offset = results_.offsets.data() + i;
    if (i == 0) offset[0] = 0;
    offset[1] = offset[0] + pages;
    int64_t at = offset[0];
    for (const Pages* part : {&tile.mine, &run.past()}) {
      std::copy(part->heads.begin(), part->heads.end(), results_.heads.data() + at);
      std::copy(part->blocks.begin(), part->blocks.end(), results_.blocks.data() + at);
      for (const int64_t block : part->blocks) results_.rows.data()[at++] = tile.rows[block];
    }
    for (int kind = 0; kind < 4; ++kind)
      std::copy_n(run.masses() + kind * pages, pages, results_.masses.data() + kind * most + offset[0]);
    if (run.recalled().empty()) std::fill_n(results_.recalled.data() + offset[0], pages, uint8_t{0});
    else std::copy_n(run.recalled().data(), pages, results_.recalled.data() + offset[0]);
    std::copy(run.ratio().begin(), run.ratio().end(), results_.ratios.data() + ratios_);
    ratios_ += static_cast<int64_t>(run.ratio().size());
    results_.missed.data()[i] = run.missed();
  }

  Tiles& tiles_;
  Array<const int32_t> table_;
  States queries_, output_;
  Results results_;
  LayerView view_;
  std::vector<TileRun> runs_;
  size_t at_ = 0, stop_ = 0;  // the tiles that are worked on: those before are finished
  int64_t ratios_ = 0;
};

bool within(nb::handle states, double most) {
  const States numbers(states, "states", -1, -1, -1);
  return numbers.within(static_cast<float>(most));
}

}  // namespace

void bind_batch(nb::module_& module) {
  nb::class_<Tiles>(module, "Tiles", "The tiles of a step in layers of one window; see kvpager.ports.Tiles.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, int64_t, int64_t, int64_t, int64_t, int64_t, nb::tuple>(),
           nb::arg("rows"), nb::arg("tiles"), nb::arg("given").none(), nb::arg("layers"), nb::arg("kv_heads"),
           nb::arg("page_size"), nb::arg("group_pages"), nb::arg("window"), nb::arg("budget"))
      .def_prop_ro("pages", &Tiles::pages, "Pages of all tiles together, at most.")
      .def_prop_ro("ratios", &Tiles::ratios, "Candidates of the tiles that choose, all heads.");
  nb::class_<Batch>(module, "Batch", "The attention of all tiles in one layer.")
      .def(nb::init<Tiles&, Frames&, nb::handle, int64_t, nb::object, nb::handle, double, double, nb::handle, nb::tuple>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), nb::arg("tiles"), nb::arg("storage"),
           nb::arg("table"), nb::arg("layer"), nb::arg("digest").none(), nb::arg("queries"), nb::arg("scale"),
           nb::arg("softcap"), nb::arg("output"), nb::arg("results"))
      .def("advance", &Batch::advance, nb::arg("room"),
           "Go on as far as resident pages allow: None when all is done, else (pages wanted now, and after them).");
  module.def("within", &within, nb::arg("states"), nb::arg("most"),
             "Whether all numbers, [heads, tokens, channels], are in -most..most; NaN is not.");
  module.def("write_tokens", &write_tokens, nb::arg("storage"), nb::arg("table"), nb::arg("layer"), nb::arg("layers"),
             nb::arg("kv_heads"), nb::arg("pieces"), nb::arg("keys"), nb::arg("values"), nb::arg("digest").none(),
             nb::arg("full"),
             "Write pieces [n, 4] (row, offset, first token, tokens) of keys and values to the pages of all heads, and "
             "make the digests of the rows that are full now.");
}

}  // namespace kvpager
