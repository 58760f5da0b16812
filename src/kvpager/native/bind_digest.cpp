// Digests' Python face. What is checked, and what lies where: digest_store.h and digest.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "digest_store.h"

namespace kvpager {

void bind_digest(nb::module_& module) {
  nb::class_<DigestStore>(module, "DigestStore", "2-bit digests of pages; see kvpager.kernels.native_digest.")
      .def(nb::init<int, int, int, int>(), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("page_size"))
      .def_prop_ro("capacity", &DigestStore::capacity)
      .def_prop_ro("page_bytes", &DigestStore::page_bytes)
      .def_prop_ro("nbytes", &DigestStore::nbytes)
      .def_prop_ro("scratch_nbytes", &DigestStore::scratch_nbytes)
      .def_prop_rw("timed", [](const DigestStore& store) { return store.clock().on(); },
                   [](const DigestStore& store, bool on) { store.clock().set(on); },
                   "Whether the time of building and choosing inside of other calls is counted; setting it begins at 0.")
      .def_prop_ro("nanoseconds", [](const DigestStore& store) { return store.clock().nanoseconds(); },
                   "What was counted: the time by which those calls took longer.")
      .def("grow", &DigestStore::grow, nb::arg("rows"))
      .def("build", &DigestStore::build, nb::arg("layer"), nb::arg("rows").noconvert(), nb::arg("keys").noconvert())
      .def_prop_ro("row_bytes", &DigestStore::row_bytes)
      .def("dump", &DigestStore::dump, nb::arg("rows").noconvert(), nb::arg("digests").noconvert())
      .def("load", &DigestStore::load, nb::arg("rows").noconvert(), nb::arg("digests").noconvert())
      .def("choose", &DigestStore::choose, nb::arg("layer"), nb::arg("rows").noconvert(),
           nb::arg("queries").noconvert(), nb::arg("starts").noconvert(), nb::arg("own_lse").noconvert(),
           nb::arg("start"), nb::arg("scale"), nb::arg("window").none(), nb::arg("softcap").none(), nb::arg("sample"),
           nb::arg("room"), nb::arg("sinks"), nb::arg("recent"), nb::arg("chosen").noconvert(),
           nb::arg("ratio").noconvert());
}

}  // namespace kvpager
