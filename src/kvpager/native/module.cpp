// kvpager._native: the compiled kernels' Python face. Each concern binds its own functions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "isa.h"
#include "memory.h"
#include "stream.h"
#include "threads.h"

namespace nb = nanobind;

namespace kvpager {

void bind_attention(nb::module_& module);
void bind_digest(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_swap(nb::module_& module);
void bind_tile(nb::module_& module);

namespace {

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> allocate(size_t bytes) {
  auto* region = new Region(bytes);
  nb::capsule owner(region, [](void* held) noexcept { delete static_cast<Region*>(held); });
  return {region->data(), {bytes}, owner};
}

double stream_read(nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> array, int repeats) {
  const auto bytes = static_cast<int64_t>(array.size());
  if (bytes == 0) throw std::invalid_argument("array: it is empty");
  if (repeats < 1 || repeats > 1000)
    throw std::invalid_argument("repeats: " + std::to_string(repeats) + " is not in 1..1000");
  const uint8_t* data = array.data();
  const int64_t pieces = (bytes + kStreamPiece - 1) / kStreamPiece;
  std::vector<double> seconds;
  std::atomic<uint64_t> sum{0};  // so that no read can be left out
  nb::gil_scoped_release release;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto began = std::chrono::steady_clock::now();
    parallel(pieces, [&](int64_t piece, int) {
      const int64_t at = piece * kStreamPiece;
      sum.fetch_add(stream().read(data + at, std::min(kStreamPiece, bytes - at)), std::memory_order_relaxed);
    });
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);  // a program may end while modules or threads still hold what is bound here
  module.doc() = "Compiled kernels over pages; see kvpager.kernels.native for their Python side.";
  module.def("isa", [] { return isa_name(active_isa()); }, "The instruction set that kernels use.");
  module.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
      },
      "Instruction sets that can be used here, the best one last.");
  module.def("set_isa", &set_isa, nb::arg("name"), "Use another instruction set; ValueError where it is not available.");
  module.def("threads", &threads, "Threads that the kernels use; 0 until a number was set (one is used then).");
  module.def("set_threads", &set_threads, nb::arg("count"), "Use so many threads, 1 to 256; ValueError otherwise.");
  module.def("allocate", &allocate, nb::arg("bytes"),
             "Zeroed memory between guard pages, uint8 [bytes], aligned to 64 and in huge pages where possible.");
  module.def("stream_read", &stream_read, nb::arg("array").noconvert(), nb::arg("repeats"),
             "Seconds to read uint8 [bytes] once with all threads, the median of so many times; ValueError for an empty "
             "array, or repeats not in 1..1000.");
  bind_attention(module);
  bind_digest(module);
  bind_linear(module);
  bind_swap(module);
  bind_tile(module);
}

}  // namespace kvpager
