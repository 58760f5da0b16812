// kvpager._native: the compiled kernels' Python face. Each concern binds its own functions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "memory.h"
#include "threads.h"

namespace nb = nanobind;

namespace kvpager {

void bind_attention(nb::module_& module);
void bind_digest(nb::module_& module);
void bind_linear(nb::module_& module);

namespace {

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> allocate(size_t bytes) {
  auto* region = new Region(bytes);
  nb::capsule owner(region, [](void* held) noexcept { delete static_cast<Region*>(held); });
  return {region->data(), {bytes}, owner};
}

}  // namespace

NB_MODULE(_native, module) {
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
  bind_attention(module);
  bind_digest(module);
  bind_linear(module);
}

}  // namespace kvpager
