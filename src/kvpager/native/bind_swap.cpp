// Copying between frames and swap, for Python. Every index is checked here; addresses of slabs are trusted.
#include <nanobind/nanobind.h>

#include <string>

#include "arguments.h"
#include "isa.h"
#include "swap.h"

namespace nb = nanobind;

namespace kvpager {

KV_DECLARE_TABLE(SwapTable, swap)

namespace {

void copy_pages(nb::handle slabs, nb::handle starts, int64_t capacity, nb::handle slots, nb::handle memory,
                nb::handle rows, bool to_slots, nb::handle sums) {
  const Ints addresses(slabs, "slabs", {-1}), first(starts, "starts", {addresses.size(0)});
  const Ints at(slots, "slots", {-1}), of(rows, "rows", {at.size(0)});
  Array<int64_t> sum(sums, "sums", {at.size(0)});
  const int64_t slab_count = addresses.size(0);
  for (int64_t i = 0; i < slab_count; ++i)
    if (i == 0 ? first.data()[0] != 0 : first.data()[i] <= first.data()[i - 1])
      refuse("starts: they do not ascend from 0");
  check_range(at, "slots", slab_count ? capacity : 0);
  const auto run = [&](uint8_t* bytes, int64_t page_bytes) {
    const SwapArgs args{addresses.data(), first.data(), slab_count, page_bytes, at.data(),
                        bytes, of.data(), at.size(0), reinterpret_cast<uint64_t*>(sum.data())};
    nb::gil_scoped_release release;
    swap().copy(args, to_slots);
  };
  if (to_slots) {
    const Array<const uint8_t> from(memory, "memory", {-1, -1});
    check_range(of, "rows", from.size(0));
    run(const_cast<uint8_t*>(from.data()), from.size(1));
  } else {
    const Array<uint8_t> to(memory, "memory", {-1, -1});
    check_range(of, "rows", to.size(0));
    run(to.data(), to.size(1));
  }
}

}  // namespace

void bind_swap(nb::module_& module) {
  module.def("copy_pages", &copy_pages, nb::arg("slabs"), nb::arg("starts"), nb::arg("capacity"), nb::arg("slots"),
             nb::arg("memory"), nb::arg("rows"), nb::arg("to_slots"), nb::arg("sums"),
             "Copy pages between rows of memory, uint8 [N, page_bytes], and slots of slabs (their addresses and first "
             "slots), and write the checksum of each.");
}

}  // namespace kvpager
