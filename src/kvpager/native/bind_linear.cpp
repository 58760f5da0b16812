#include <nanobind/nanobind.h>

namespace kvpager {

void bind_linear(nanobind::module_&) {}

}  // namespace kvpager
