// Frames, attention over them and its joining, for Python. Every size and index is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <new>
#include <string>
#include <vector>

#include "arguments.h"
#include "attention.h"
#include "frames.h"
#include "isa.h"
#include "pages.h"

namespace nb = nanobind;

namespace kvpager {

KV_DECLARE_TABLE(AttentionTable, attention)
KV_DECLARE_TABLE(PagesTable, pages)

namespace {

int64_t size_of(const Frames& frames) { return frames.layout().page_size; }
int64_t dim_of(const Frames& frames) { return frames.layout().head_dim; }

void write(Frames& self, nb::handle frames, int64_t offset, nb::handle keys, nb::handle values) {
  const Ints at(frames, "frames", {-1});
  const Floats k(keys, "keys", {at.size(0), -1, dim_of(self)});
  const Floats v(values, "values", {at.size(0), k.size(1), dim_of(self)});
  check_range(at, "frames", self.count());
  if (offset < 0 || k.size(1) < 1 || k.size(1) > size_of(self) || offset > size_of(self) - k.size(1))
    refuse("offset: tokens " + std::to_string(offset) + " to " + std::to_string(offset + k.size(1)) +
           " are not in a page of " + std::to_string(size_of(self)));
  std::vector<int64_t> slots(static_cast<size_t>(at.size(0)));
  self.slots_to_write(at.data(), at.size(0), offset, k.size(1), slots.data());
  const TokenArgs args{self.view(), at.data(), slots.data(), at.size(0), offset, k.size(1),
                       const_cast<float*>(k.data()), const_cast<float*>(v.data())};
  nb::gil_scoped_release release;
  pages().write(args);
}

void read(const Frames& self, nb::handle frames, nb::handle counts, nb::handle keys, nb::handle values) {
  const Ints at(frames, "frames", {-1});
  Array<float> k(keys, "keys", {at.size(0), size_of(self), dim_of(self)});
  Array<float> v(values, "values", {at.size(0), size_of(self), dim_of(self)});
  check_range(at, "frames", self.count());
  std::vector<int64_t> slots(static_cast<size_t>(at.size(0)));
  if (counts.is_none()) {
    self.slots_to_read(at.data(), nullptr, at.size(0), slots.data());
  } else {
    const Ints written(counts, "counts", {at.size(0)});
    check_range(written, "counts", size_of(self) + 1);
    self.slots_to_read(at.data(), written.data(), at.size(0), slots.data());
  }
  const TokenArgs args{const_cast<Frames&>(self).view(), at.data(), slots.data(), at.size(0), 0, size_of(self),
                       k.data(), v.data()};
  nb::gil_scoped_release release;
  pages().read(args);
}

void load(Frames& self, nb::handle frames, nb::handle bytes) {
  const Ints at(frames, "frames", {-1});
  const Array<const uint8_t> from(bytes, "pages", {at.size(0), static_cast<int64_t>(self.layout().page_bytes)});
  check_range(at, "frames", self.count());
  self.finish(at.data(), at.size(0));
  const FrameView view = self.view();
  nb::gil_scoped_release release;
  pages().load(view, at.data(), from.data(), at.size(0));
}

void dump(Frames& self, nb::handle frames, nb::handle bytes) {
  const Ints at(frames, "frames", {-1});
  Array<uint8_t> to(bytes, "pages", {at.size(0), static_cast<int64_t>(self.layout().page_bytes)});
  check_range(at, "frames", self.count());
  const FrameView view = self.view();
  nb::gil_scoped_release release;
  pages().dump(view, at.data(), to.data(), at.size(0));
}

void copy(Frames& self, nb::handle source, nb::handle target) {
  const Ints from(source, "source", {-1});
  const Ints to(target, "target", {from.size(0)});
  check_range(from, "source", self.count());
  check_range(to, "target", self.count());
  self.copy_slots(from.data(), to.data(), from.size(0));
  const FrameView view = self.view();
  nb::gil_scoped_release release;
  pages().copy(view, from.data(), to.data(), from.size(0));
}

void finish(Frames& self, nb::handle frames) {
  const Ints at(frames, "frames", {-1});
  check_range(at, "frames", self.count());
  self.finish(at.data(), at.size(0));
}

void held(const Frames& self, nb::handle frames, nb::handle held) {
  const Ints at(frames, "frames", {-1});
  Array<uint8_t> to(held, "held", {at.size(0)});
  check_range(at, "frames", self.count());
  self.held(at.data(), at.size(0), to.data());
}

void tokens(Frames& self, nb::handle frames, nb::handle offsets, nb::handle bytes) {
  const Ints at(frames, "frames", {-1});
  const Ints token(offsets, "offsets", {at.size(0)});
  Array<uint8_t> to(bytes, "tokens", {at.size(0), self.token_bytes()});
  check_range(at, "frames", self.count());
  check_range(token, "offsets", size_of(self));
  nb::gil_scoped_release release;
  self.tokens(at.data(), token.data(), at.size(0), to.data());
}

void check_pages(const Frames& frames, const Ints& at, const Ints& heads, const Ints& starts, const Ints& counts,
                 int64_t kv_heads) {
  check_range(at, "frames", frames.count());
  check_range(heads, "heads", kv_heads);
  check_range(starts, "starts", int64_t{1} << 48);
  check_range(counts, "counts", size_of(frames) + 1);
  for (int64_t i = 1; i < heads.size(0); ++i)
    if (heads.data()[i] < heads.data()[i - 1]) refuse("heads: pages are not sorted by head");
}

// The log-sum-exp of pages as the kernel lays them out: see AttendArgs. `pages` -1 for any.
template <class T>
class PageLse : public Array<T> {
 public:
  PageLse(nb::handle from, int64_t pages, int64_t group, int64_t tokens)
      : Array<T>(from, "page_lse", {tokens == 1 ? group : pages, tokens == 1 ? 1 : group, tokens == 1 ? pages : tokens}),
        axis_(tokens == 1 ? 2 : 0) {}
  int64_t pages() const { return this->size(axis_); }

 private:
  int axis_;
};

void attend(Frames& frames, nb::handle page_frames, nb::handle heads, nb::handle starts, nb::handle counts,
            int64_t kv_heads, nb::handle queries, int64_t start, double scale, int64_t window, double softcap,
            nb::handle output, nb::handle lse, nb::handle page_lse) {
  const Ints at(page_frames, "frames", {-1});
  const int64_t pages = at.size(0);
  const Ints of_head(heads, "heads", {pages}), begin(starts, "starts", {pages}), written(counts, "counts", {pages});
  const Floats q(queries, "queries", {-1, -1, dim_of(frames)});
  const int64_t query_heads = q.size(0), tokens = q.size(1);
  if (kv_heads < 1 || query_heads < 1 || tokens < 1 || query_heads % kv_heads || query_heads > (1 << 16) ||
      tokens > (1 << 16))
    refuse("queries: " + std::to_string(query_heads) + " heads of " + std::to_string(tokens) + " tokens for " +
           std::to_string(kv_heads) + " KV heads");
  check_pages(frames, at, of_head, begin, written, kv_heads);
  if (start < 0 || start >= int64_t{1} << 48) refuse("start: " + std::to_string(start) + " is not a position");
  if (window < 0 || window >= int64_t{1} << 48) refuse("window: " + std::to_string(window) + " is not in 0..2^48");
  if (!std::isfinite(scale) || !std::isfinite(softcap) || softcap < 0) refuse("scale, softcap: not finite numbers");
  const int64_t group = query_heads / kv_heads;
  Array<float> out(output, "output", {query_heads, tokens, dim_of(frames)});
  Array<float> sums(lse, "lse", {query_heads, tokens});
  AttendArgs args{frames.view(), at.data(), of_head.data(), begin.data(), written.data(), pages, 0, kv_heads, group, tokens,
                  q.data(), start, window, static_cast<float>(scale), static_cast<float>(softcap), out.data(),
                  sums.data(), nullptr};
  const auto run = [&args] {
    nb::gil_scoped_release release;
    return attention().attend(args);
  };
  bool done;
  if (page_lse.is_none()) {
    done = run();
  } else {
    PageLse<float> by_page(page_lse, pages, group, tokens);
    args.page_lse = by_page.data();
    done = run();
  }
  if (!done) throw std::bad_alloc();
}

// The arrays of one partial result: (output, lse, page_lse).
struct PartArrays {
  Floats output, lse;
  PageLse<const float> page_lse;
  PartArrays(nb::handle o, nb::handle l, nb::handle p, int64_t query_heads, int64_t tokens, int64_t dim, int64_t group)
      : output(o, "output", {query_heads, tokens, dim}), lse(l, "lse", {query_heads, tokens}),
        page_lse(p, -1, group, tokens) {}
};

void settle(nb::list parts, nb::handle heads, int64_t kv_heads, nb::handle output, nb::handle masses) {
  const Ints of_head(heads, "heads", {-1});
  Array<float> mass(masses, "masses", {4, of_head.size(0)});
  const size_t count = parts.size();
  if (count == 0) refuse("parts: there are none");
  if (kv_heads < 1) refuse("kv_heads: " + std::to_string(kv_heads) + " is not above zero");
  check_range(of_head, "heads", kv_heads);
  int64_t query_heads, tokens, dim;
  {
    const nb::tuple first = nb::cast<nb::tuple>(parts[0]);
    const Floats shape(first[0], "output", {-1, -1, -1});
    query_heads = shape.size(0), tokens = shape.size(1), dim = shape.size(2);
  }
  if (query_heads < 1 || query_heads % kv_heads || tokens < 1 || dim < 1)
    refuse("output: " + std::to_string(query_heads) + " heads for " + std::to_string(kv_heads) + " KV heads");
  const int64_t group = query_heads / kv_heads;
  std::vector<std::unique_ptr<PartArrays>> held;
  std::vector<SettlePart> found;
  int64_t pages = 0;
  for (nb::handle item : parts) {
    const nb::tuple part = nb::cast<nb::tuple>(item);
    if (part.size() != 3) refuse("parts: each is (output, lse, page_lse)");
    held.push_back(std::make_unique<PartArrays>(part[0], part[1], part[2], query_heads, tokens, dim, group));
    const PartArrays& arrays = *held.back();
    found.push_back({arrays.output.data(), arrays.lse.data(), arrays.page_lse.data(), arrays.page_lse.pages()});
    pages += arrays.page_lse.pages();
  }
  if (pages != of_head.size(0))
    refuse("heads: " + std::to_string(of_head.size(0)) + " given for " + std::to_string(pages) + " pages");
  SettleArgs args{found.data(), static_cast<int64_t>(count), of_head.data(), kv_heads, group, tokens, dim, nullptr,
                  mass.data(), pages};
  const auto run = [&args] {
    nb::gil_scoped_release release;
    return attention().settle(args);
  };
  bool done;
  if (count > 1) {
    Array<float> out(output, "output", {query_heads, tokens, dim});
    args.output = out.data();
    done = run();
  } else {
    done = run();
  }
  if (!done) throw std::bad_alloc();
}

// The bytes of all frames, [frames][page_bytes]; the array keeps the frames alive.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> memory(nb::handle self) {
  Frames& frames = nb::cast<Frames&>(self);
  const FrameView view = frames.view();
  return {view.frames, {static_cast<size_t>(frames.count()), view.layout.page_bytes}, self};
}

int64_t page_bytes(const Frames& frames) { return static_cast<int64_t>(frames.layout().page_bytes); }

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<Frames>(module, "Frames", "The bytes of a pool's frames; kvpager.kernels.native_storage is their face.")
      .def(nb::init<int64_t, const std::string&, int64_t, int64_t>(), nb::arg("frames"), nb::arg("dtype"),
           nb::arg("page_size"), nb::arg("head_dim"))
      .def_prop_ro("count", &Frames::count)
      .def_prop_ro("page_bytes", &page_bytes)
      .def_prop_ro("nbytes", &Frames::nbytes)
      .def_prop_ro("memory", &memory)
      .def("write", &write, nb::arg("frames"), nb::arg("offset"), nb::arg("keys"), nb::arg("values"))
      .def("read", &read, nb::arg("frames"), nb::arg("counts").none(), nb::arg("keys"), nb::arg("values"))
      .def("load", &load, nb::arg("frames"), nb::arg("pages"))
      .def("dump", &dump, nb::arg("frames"), nb::arg("pages"))
      .def("copy", &copy, nb::arg("source"), nb::arg("target"))
      .def("finish", &finish, nb::arg("frames"))
      .def("held", &held, nb::arg("frames"), nb::arg("held"))
      .def_prop_ro("token_bytes", &Frames::token_bytes)
      .def("tokens", &tokens, nb::arg("frames"), nb::arg("offsets"), nb::arg("tokens"));
  module.def("attend", &attend, nb::arg("storage"), nb::arg("frames"), nb::arg("heads"), nb::arg("starts"),
             nb::arg("counts"), nb::arg("kv_heads"), nb::arg("queries"), nb::arg("start"), nb::arg("scale"),
             nb::arg("window"), nb::arg("softcap"), nb::arg("output"), nb::arg("lse"), nb::arg("page_lse").none(),
             "Attend one tile to one group of pages; writes output, lse and page_lse.");
  module.def("settle", &settle, nb::arg("parts"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("output").none(),
             nb::arg("masses"), "Join groups of pages; writes output (of more than one) and masses [4, n].");
}

}  // namespace kvpager
