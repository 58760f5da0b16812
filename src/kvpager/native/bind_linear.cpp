// Products with packed weights, gated multilayer perceptrons and norms: what is checked before kernels run.
//
// Inputs and outputs come as addresses with their number of elements: taking a PyTorch tensor apart costs more than a
// small product, and there are a hundred products in a decode step. The Python side gives addresses of contiguous
// bfloat16 memory alone; numbers of elements are checked here against the matrix.
#include "norms.h"
#include "packed_matrix.h"

namespace kvpager {

namespace {

void rms_norm(uint64_t x, int64_t elements, uint64_t weight, int64_t width, double epsilon, bool plus_one,
              uint64_t to) {
  if (width < 1) refuse("width: " + std::to_string(width) + " is not positive");
  const int64_t rows = rows_in(elements, width, "x");
  if (rows == 0) return;
  const auto* source = address<const uint16_t>(x, "x");
  const auto* scale = address<const uint16_t>(weight, "weight");
  auto* target = address<uint16_t>(to, "to");
  const NormTable& kernels = norm();
  const nb::gil_scoped_release release;
  (plus_one ? kernels.rms_plus_one : kernels.rms)(source, scale, static_cast<float>(epsilon), rows, width, target);
}

// Queries and keys [tokens][heads][width] turned by angles [angles][width], token t by the angle t % angles.
void rotate(uint64_t queries, int64_t queries_size, uint64_t keys, int64_t keys_size, uint64_t cosine, uint64_t sine,
            int64_t angles_size, int64_t tokens, int64_t width, uint64_t to_queries, uint64_t to_keys) {
  if (width < 2 || width % 2 != 0) refuse("width: " + std::to_string(width) + " is not a positive even number");
  if (tokens < 1) refuse("tokens: " + std::to_string(tokens) + " is not positive");
  const int64_t angles = rows_in(angles_size, width, "cosine");
  if (angles < 1 || tokens % angles != 0)
    refuse("cosine: " + std::to_string(angles) + " rows for " + std::to_string(tokens) + " tokens");
  const int64_t query_heads = rows_in(queries_size, tokens * width, "queries");
  const int64_t key_heads = rows_in(keys_size, tokens * width, "keys");
  const auto* cosines = address<const uint16_t>(cosine, "cosine");
  const auto* sines = address<const uint16_t>(sine, "sine");
  const auto* q = address<const uint16_t>(queries, "queries");
  const auto* k = address<const uint16_t>(keys, "keys");
  auto* to_q = address<uint16_t>(to_queries, "to_queries");
  auto* to_k = address<uint16_t>(to_keys, "to_keys");
  const NormTable& kernels = norm();
  const nb::gil_scoped_release release;
  kernels.rotate(q, cosines, sines, tokens, angles, query_heads, width, to_q);
  kernels.rotate(k, cosines, sines, tokens, angles, key_heads, width, to_k);
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<PackedMatrix>(module, "PackedMatrix", "Weights packed for products; see kvpager.kernels.linear.")
      .def(nb::init<Memory, std::vector<int64_t>, int64_t, const std::string&, bool>(), nb::arg("memory"),
           nb::arg("outputs"), nb::arg("inputs"), nb::arg("weights"), nb::arg("gated"))
      .def_static("packed_bytes", &PackedMatrix::packed_bytes, nb::arg("outputs"), nb::arg("inputs"),
                  nb::arg("weights"), nb::arg("gated"))
      .def("write", &PackedMatrix::write, nb::arg("part"), nb::arg("half"), nb::arg("first"), nb::arg("source"),
           nb::arg("elements"))
      .def("read", &PackedMatrix::read, nb::arg("part"), nb::arg("half"), nb::arg("first"), nb::arg("to"),
           nb::arg("elements"))
      .def("read_rows", &PackedMatrix::read_rows, nb::arg("ids"), nb::arg("count"), nb::arg("to"), nb::arg("elements"))
      .def("set_bias", &PackedMatrix::set_bias, nb::arg("part"), nb::arg("half"), nb::arg("source"),
           nb::arg("elements"))
      .def("product",
           [](const PackedMatrix& self, uint64_t x, int64_t elements, uint64_t to, int64_t size) {
             self.product(x, elements, &to, &size, 1);
           }, nb::arg("x"), nb::arg("elements"), nb::arg("to"), nb::arg("size"))
      .def("product3",
           [](const PackedMatrix& self, uint64_t x, int64_t elements, uint64_t a, int64_t a_size, uint64_t b,
              int64_t b_size, uint64_t c, int64_t c_size) {
             const uint64_t to[] = {a, b, c};
             const int64_t sizes[] = {a_size, b_size, c_size};
             self.product(x, elements, to, sizes, 3);
           })
      .def("gated", &PackedMatrix::gated, nb::arg("down"), nb::arg("activation"), nb::arg("x"), nb::arg("elements"),
           nb::arg("to"), nb::arg("size"))
      .def_prop_ro("outputs", &PackedMatrix::outputs)
      .def_prop_ro("inputs", &PackedMatrix::inputs)
      .def_prop_ro("weights", &PackedMatrix::weights)
      .def_prop_ro("bytes", &PackedMatrix::bytes);
  module.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("elements"), nb::arg("weight"), nb::arg("width"),
             nb::arg("epsilon"), nb::arg("plus_one"), nb::arg("to"));
  module.def("rotate", &rotate, nb::arg("queries"), nb::arg("queries_size"), nb::arg("keys"), nb::arg("keys_size"),
             nb::arg("cosine"), nb::arg("sine"), nb::arg("angles_size"), nb::arg("tokens"), nb::arg("width"),
             nb::arg("to_queries"), nb::arg("to_keys"));
}

}  // namespace kvpager
