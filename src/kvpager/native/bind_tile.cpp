// One tile of one layer in one call, where all the pages that it wants lie in frames: its own pages, the choice among
// the past ones, those, and the joining. The same kernels in the same order as when Python calls them one by one.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <string>
#include <vector>

#include "arguments.h"
#include "attention.h"
#include "digest_store.h"
#include "frames.h"
#include "isa.h"
#include "threads.h"

namespace kvpager {

KV_DECLARE_TABLE(AttentionTable, attention)

namespace {

using Ints = Array<const int64_t>;
using Floats = Array<const float>;

constexpr size_t kKeptFloats = size_t{1} << 21;

enum Outcome : int { kNothing = 0, kChosen = 1, kAttended = 2 };

// Pages of a tile, sorted by head, then by position; `flat` are their places in the page table in layer 0.
struct Pages {
  const int64_t *flat, *heads, *starts, *counts;
  int64_t count;
  std::vector<int64_t> frames;

  // False when a page is absent.
  bool find(const Array<const int32_t>& table, int64_t offset) {
    frames.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      frames[static_cast<size_t>(i)] = table.data()[flat[i] + offset];
      if (frames[static_cast<size_t>(i)] < 0) return false;
    }
    return true;
  }
};

// The arrays of pages that Python made.
struct PageArrays {
  Ints flat, heads, starts, counts;
  explicit PageArrays(const nb::tuple& from)
      : flat(from[0], "flat", {-1}), heads(from[1], "heads", {flat.size(0)}), starts(from[2], "starts", {flat.size(0)}),
        counts(from[3], "counts", {flat.size(0)}) {}

  Pages pages(int64_t kv_heads, int64_t page_size, int64_t table, int64_t offset) const {
    const int64_t *at = flat.data(), *head = heads.data(), *start = starts.data(), *written = counts.data();
    for (int64_t i = 0; i < flat.size(0); ++i) {  // words are made only for what is wrong
      if (at[i] < 0 || at[i] >= table - offset) require(false, is_not("flat", at[i], "in the table"));
      if (head[i] < (i ? head[i - 1] : 0) || head[i] >= kv_heads) require(false, is_not("heads", head[i], "in order"));
      if (start[i] < 0 || start[i] >= int64_t{1} << 48) require(false, is_not("starts", start[i], "a position"));
      if (written[i] < 0 || written[i] > page_size) require(false, is_not("counts", written[i], "of a page"));
    }
    return {flat.data(), heads.data(), starts.data(), counts.data(), flat.size(0), {}};
  }
};

// Partial results of groups of pages, in memory that the calling thread keeps.
class Parts {
 public:
  Parts(const AttendArgs& tile, int64_t dim, int64_t group_pages, std::vector<float>& memory)
      : args_(tile), dim_(dim), most_(group_pages), memory_(memory) {
    memory_.clear();
  }
  // What the thread keeps between calls is bounded; a long tile over a long past needs more for once.
  ~Parts() {
    if (memory_.capacity() > kKeptFloats) std::vector<float>().swap(memory_);
  }
  Parts(const Parts&) = delete;

  void add(const Pages& pages) {
    for (int64_t first = 0; first < pages.count; first += most_)
      spans_.push_back({&pages, first, std::min(most_, pages.count - first)});
  }

  // Attends to what was added since the last call.
  void attend() {
    const int64_t queries = args_.kv_heads * args_.group * args_.tokens;
    size_t total = 0;
    for (const Span& span : spans_) total += static_cast<size_t>(size(span, queries));
    memory_.resize(total);
    parts_.clear();
    std::vector<AttendArgs> calls;
    size_t at = 0;
    for (const Span& span : spans_) {
      AttendArgs args = args_;
      args.frames = span.pages->frames.data() + span.first;
      args.heads = span.pages->heads + span.first;
      args.starts = span.pages->starts + span.first;
      args.counts = span.pages->counts + span.first;
      args.pages = span.count;
      args.output = memory_.data() + at;
      args.lse = args.output + queries * dim_;
      args.page_lse = args.lse + queries;
      parts_.push_back({args.output, args.lse, args.page_lse, span.count});
      at += static_cast<size_t>(size(span, queries));
      if (parts_.size() > done_) calls.push_back(args);
    }
    // Whole groups side by side: a group's own units would have the threads meet after every one. What is left over
    // when each thread has had as many as the others is cut into units again.
    const size_t workers = static_cast<size_t>(std::max(threads(), 1));
    const size_t together = calls.size() >= 2 * workers ? calls.size() / workers * workers : 0;
    std::atomic<bool> room{true};
    if (workers > 1 && together > 0)
      parallel(static_cast<int64_t>(together), [&](int64_t i, int) {
        if (!attention().attend(calls[static_cast<size_t>(i)])) room = false;
      });
    for (size_t i = workers > 1 ? together : 0; i < calls.size(); ++i)
      if (!attention().attend(calls[i])) room = false;
    if (!room) throw std::bad_alloc();
    done_ = spans_.size();
  }

  const std::vector<SettlePart>& all() const { return parts_; }

 private:
  struct Span {
    const Pages* pages;
    int64_t first, count;
  };
  int64_t size(const Span& span, int64_t queries) const {
    return queries * (dim_ + 1) + span.count * args_.group * args_.tokens;
  }

  const AttendArgs args_;
  const int64_t dim_, most_;
  std::vector<float>& memory_;
  std::vector<Span> spans_;
  std::vector<SettlePart> parts_;
  size_t done_ = 0;
};

// Where a choice's pages are put: heads and blocks [room * H], flat places, and what attention wants to know of them.
// Only when it is `full`: scores beyond float32 make estimates that are no numbers, and those choose fewer pages.
struct Chosen {
  std::vector<uint8_t> flags;
  std::vector<int64_t> flat, starts, counts;

  bool full(int64_t room) const { return std::count(flags.begin(), flags.end(), uint8_t{1}) == room; }

  Pages pages(const DigestChoice& choice, int64_t first, int64_t row_stride, int64_t* heads, int64_t* blocks,
              int64_t room) {
    const int64_t n = choice.pages, size = choice.shape.page_size;
    flat.clear(), starts.clear();
    for (int64_t head = 0; head < choice.shape.heads; ++head)
      for (int64_t i = 0; i < n; ++i)
        if (flags[static_cast<size_t>(head * n + i)]) {
          const size_t at = flat.size();
          heads[at] = head, blocks[at] = first + i;
          flat.push_back(choice.rows[i] * row_stride + head);
          starts.push_back((first + i) * size);
        }
    counts.assign(flat.size(), size);
    return {flat.data(), heads, starts.data(), counts.data(), room, {}};
  }
};

// The arguments that all tiles have.
struct Query {
  Floats queries;
  int64_t kv_heads;
  AttendArgs args;

  Query(Frames& frames, nb::handle array, int64_t heads, int64_t start, double scale, int64_t window, double softcap)
      : queries(array, "queries", {-1, -1, frames.layout().head_dim}), kv_heads(heads) {
    const int64_t query_heads = queries.size(0), tokens = queries.size(1);
    require(heads >= 1 && query_heads >= 1 && query_heads % heads == 0 && query_heads <= 65536,
            is_not("queries: query heads", query_heads, "a multiple of the KV heads"));
    require(tokens >= 1 && tokens <= 65536, is_not("queries: tokens", tokens, "in 1..65536"));
    require(start >= 0 && start < int64_t{1} << 48, is_not("start", start, "a position"));
    require(window >= 0 && window < int64_t{1} << 48, is_not("window", window, "in 0..2^48"));
    require(std::isfinite(scale) && std::isfinite(softcap) && softcap >= 0, "scale, softcap: not finite numbers");
    args = {frames.view(), nullptr, nullptr, nullptr, nullptr, 0, heads, query_heads / heads, tokens, queries.data(),
            start, window, static_cast<float>(scale), static_cast<float>(softcap), nullptr, nullptr, nullptr};
  }
};

void settle(const Query& query, const Parts& parts, int64_t dim, const int64_t* own, int64_t own_count,
            const int64_t* past, int64_t past_count, float* output, float* masses) {
  std::vector<int64_t> heads(own, own + own_count);
  heads.insert(heads.end(), past, past + past_count);
  const int64_t pages = own_count + past_count;
  const std::vector<SettlePart>& all = parts.all();
  SettleArgs args{all.data(), static_cast<int64_t>(all.size()), heads.data(), query.kv_heads, query.args.group,
                  query.args.tokens, dim, output, masses, pages};
  if (all.size() == 1) {
    args.output = nullptr;
    std::copy_n(all[0].output, query.kv_heads * query.args.group * query.args.tokens * dim, output);
  }
  if (!attention().settle(args)) throw std::bad_alloc();
}

std::vector<float>& memory() {
  thread_local std::vector<float> held;
  return held;
}

int attend_tile(Frames& frames, nb::handle table, int64_t offset, nb::tuple own, nb::tuple past, int64_t group_pages,
                int64_t kv_heads, nb::handle queries, int64_t start, double scale, int64_t window, double softcap,
                nb::handle output, nb::handle masses) {
  const Query query(frames, queries, kv_heads, start, scale, window, softcap);
  const Array<const int32_t> places(table, "table", {-1});
  require(offset >= 0 && group_pages >= 1, "offset, group_pages: below what they can be");
  const int64_t size = frames.layout().page_size, dim = frames.layout().head_dim;
  const PageArrays own_arrays(own), past_arrays(past);
  Pages mine = own_arrays.pages(kv_heads, size, places.size(0), offset);
  Pages before = past_arrays.pages(kv_heads, size, places.size(0), offset);
  Array<float> out(output, "output", {query.queries.size(0), query.queries.size(1), dim});
  Array<float> mass(masses, "masses", {4, mine.count + before.count});
  const nb::gil_scoped_release release;
  if (!mine.find(places, offset) || !before.find(places, offset)) return kNothing;
  Parts parts(query.args, dim, group_pages, memory());
  parts.add(mine);
  parts.attend();
  parts.add(before);
  parts.attend();
  settle(query, parts, dim, mine.heads, mine.count, before.heads, before.count, out.data(), mass.data());
  return kAttended;
}

nb::tuple choose_tile(Frames& frames, nb::handle table, int64_t offset, nb::tuple own, int64_t group_pages,
                      int64_t kv_heads, nb::handle queries, int64_t start, double scale, int64_t window, double softcap,
                      DigestStore& store, int layer, nb::handle rows, int64_t first, int64_t row_stride, int64_t sample,
                      int64_t room, int64_t sinks, int64_t recent, nb::handle output, nb::handle masses,
                      nb::handle heads, nb::handle blocks, nb::handle ratio) {
  const Query query(frames, queries, kv_heads, start, scale, window, softcap);
  const Array<const int32_t> places(table, "table", {-1});
  const int64_t size = frames.layout().page_size, dim = frames.layout().head_dim;
  require(offset >= 0 && group_pages >= 1 && first >= 0, "offset, group_pages, first: below what they can be");
  require(store.shape().heads == kv_heads && store.shape().page_size == size && store.shape().head_dim == dim,
          "digest: of another shape");
  const PageArrays own_arrays(own);
  Pages mine = own_arrays.pages(kv_heads, size, places.size(0), offset);
  require(mine.count >= 1 && mine.count <= group_pages, is_not("own pages", mine.count, "one group"));
  const Ints candidates(rows, "rows", {-1});
  const int64_t n = candidates.size(0);
  require(sinks >= 0 && recent >= 0 && sinks + recent <= room && room < n, is_not("room", room, "for the protected pages"));
  require(sample >= 1 && sample <= 65536, is_not("sample", sample, "in 1..65536"));
  require(row_stride >= offset + kv_heads, is_not("row_stride", row_stride, "of a row of the table"));
  const int64_t most_rows = places.size(0) / row_stride;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = candidates.data()[i];
    if (row < 0 || row >= most_rows) require(false, is_not("rows", row, "in the table"));
  }
  Array<float> out(output, "output", {query.queries.size(0), query.queries.size(1), dim});
  Array<float> mass(masses, "masses", {4, mine.count + room * kv_heads});
  Array<int64_t> chosen_heads(heads, "heads", {room * kv_heads}), chosen_blocks(blocks, "blocks", {room * kv_heads});
  Array<float> ratios(ratio, "ratio", {kv_heads, n});
  int outcome = kNothing;
  float missed = 0;
  {
    const nb::gil_scoped_release release;
    if (mine.find(places, offset)) {
      Parts parts(query.args, dim, group_pages, memory());
      parts.add(mine);
      parts.attend();
      Chosen chosen;
      chosen.flags.resize(static_cast<size_t>(kv_heads * n));
      std::vector<int64_t> starts(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) starts[static_cast<size_t>(i)] = (first + i) * size;
      DigestChoice choice{
          store.shape(), {}, candidates.data(), starts.data(), n, query.queries.data(), query.queries.size(1) * dim, dim,
          parts.all()[0].lse, static_cast<int>(query.args.group), query.args.tokens, start, sample, query.args.scale,
          query.args.softcap, window, sinks, recent, room, nullptr, chosen.flags.data(), ratios.data(), 0};
      store.choose_into(layer, choice);
      missed = choice.missed;
      if (chosen.full(room * kv_heads)) {
        Pages before =
            chosen.pages(choice, first, row_stride, chosen_heads.data(), chosen_blocks.data(), room * kv_heads);
        outcome = kChosen;
        if (before.find(places, offset)) {
          parts.add(before);
          parts.attend();
          settle(query, parts, dim, mine.heads, mine.count, before.heads, before.count, out.data(), mass.data());
          outcome = kAttended;
        }
      }
    }
  }
  return nb::make_tuple(outcome, missed);
}

}  // namespace

void bind_tile(nb::module_& module) {
  module.def("attend_tile", &attend_tile, nb::arg("storage"), nb::arg("table"), nb::arg("offset"), nb::arg("own"),
             nb::arg("past"), nb::arg("group_pages"), nb::arg("kv_heads"), nb::arg("queries"), nb::arg("start"),
             nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("output"), nb::arg("masses"),
             "Attend a tile to its own and to past pages, each (flat, heads, starts, counts); writes output and masses. "
             "2 where it did, 0 where a page is absent.");
  module.def("choose_tile", &choose_tile, nb::arg("storage"), nb::arg("table"), nb::arg("offset"), nb::arg("own"),
             nb::arg("group_pages"), nb::arg("kv_heads"), nb::arg("queries"), nb::arg("start"), nb::arg("scale"),
             nb::arg("window"), nb::arg("softcap"), nb::arg("digest"), nb::arg("layer"), nb::arg("rows"),
             nb::arg("first"), nb::arg("row_stride"), nb::arg("sample"), nb::arg("room"), nb::arg("sinks"),
             nb::arg("recent"), nb::arg("output"), nb::arg("masses"), nb::arg("heads"), nb::arg("blocks"),
             nb::arg("ratio"),
             "As attend_tile, with the past pages chosen by their digests: (outcome, missed). Writes heads and blocks of "
             "the chosen pages and ratio where the outcome is 1 (some of them are absent) or 2.");
}

}  // namespace kvpager
