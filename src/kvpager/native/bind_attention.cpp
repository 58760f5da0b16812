#include <nanobind/nanobind.h>

namespace kvpager {

void bind_attention(nanobind::module_&) {}

}  // namespace kvpager
