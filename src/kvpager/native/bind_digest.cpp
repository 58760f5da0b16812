#include <nanobind/nanobind.h>

namespace kvpager {

void bind_digest(nanobind::module_&) {}

}  // namespace kvpager
