// A decoder layer around its attention, in two calls: what comes before it (norm, the three projections, norms of heads,
// rotary embedding) and what comes after (output projection, residual, norm, gated multilayer perceptron, residual).
//
// Each step rounds as the packed modules one after the other do, so the results are the same bits.
#include "norms.h"
#include "packed_matrix.h"

namespace kvpager {

namespace {

int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

class PackedLayer {
 public:
  PackedLayer(const PackedMatrix& projections, const PackedMatrix& output, const PackedMatrix& gate_up,
              const PackedMatrix& down, int activation, int64_t head_dim, double epsilon_before, double epsilon_after,
              double epsilon_heads)
      : projections_(projections), output_(output), gate_up_(gate_up), down_(down),
        activation_(static_cast<Activation>(activation)), width_(projections.inputs()), head_dim_(head_dim),
        epsilon_before_(static_cast<float>(epsilon_before)), epsilon_after_(static_cast<float>(epsilon_after)),
        epsilon_heads_(static_cast<float>(epsilon_heads)) {
    if (projections.is_gated() || projections.outputs().size() != 3) refuse("projections: not a matrix of three parts");
    if (output.is_gated() || output.outputs().size() != 1) refuse("output: not a matrix of one part");
    if (!gate_up.is_gated()) refuse("gate_up: not a gated matrix");
    if (down.is_gated() || down.outputs().size() != 1) refuse("down: not a matrix of one part");
    if (activation < 0 || activation > 2) refuse("activation: " + std::to_string(activation) + " is not in 0..2");
    if (head_dim < 2 || head_dim % 2 != 0) refuse("head_dim: " + std::to_string(head_dim) + " is not a positive even number");
    for (const int64_t part : projections.outputs())
      if (part % head_dim != 0)
        refuse("projections: " + std::to_string(part) + " outputs are no heads of " + std::to_string(head_dim));
    if (output.inputs() != projections.outputs()[0] || output.outputs()[0] != width_)
      refuse("output: it does not take the queries' width to " + std::to_string(width_));
    if (gate_up.inputs() != width_ || down.inputs() != gate_up.outputs()[0] || down.outputs()[0] != width_)
      refuse("gate_up: it and `down` do not take " + std::to_string(width_) + " to " + std::to_string(width_));
    if (down.kernel().weights != gate_up.kernel().weights) refuse("down: its weights are of another type");
  }

  // x [rows][width] to queries, keys and values [rows][heads][head_dim]; query_norm and key_norm are 0 for none.
  void before(uint64_t x, int64_t elements, uint64_t norm_weight, uint64_t query_norm, uint64_t key_norm,
              uint64_t cosine, uint64_t sine, int64_t angles_size, uint64_t to_queries, int64_t queries_size,
              uint64_t to_keys, int64_t keys_size, uint64_t to_values, int64_t values_size) const {
    const int64_t rows = rows_in(elements, width_, "x");
    const int64_t angles = rows_in(angles_size, head_dim_, "cosine");
    const std::vector<int64_t>& parts = projections_.outputs();
    if (rows < 1) refuse("x: no rows");
    if (angles < 1 || rows % angles != 0)
      refuse("cosine: " + std::to_string(angles) + " rows for " + std::to_string(rows) + " tokens");
    if (queries_size != rows * parts[0] || keys_size != rows * parts[1] || values_size != rows * parts[2])
      refuse("queries, keys, values: not " + std::to_string(rows) + " rows of the projections");
    const auto* source = address<const uint16_t>(x, "x");
    const auto* scale = address<const uint16_t>(norm_weight, "norm");
    const auto* of_queries = query_norm ? address<const uint16_t>(query_norm, "query_norm") : nullptr;
    const auto* of_keys = key_norm ? address<const uint16_t>(key_norm, "key_norm") : nullptr;
    const auto* cosines = address<const uint16_t>(cosine, "cosine");
    const auto* sines = address<const uint16_t>(sine, "sine");
    auto* queries = address<uint16_t>(to_queries, "queries");
    auto* keys = address<uint16_t>(to_keys, "keys");
    const Output outputs[] = {{queries, parts[0]}, {keys, parts[1]}, {address<uint16_t>(to_values, "values"), parts[2]}};
    const LinearTable& products = linear();
    const NormTable& norms = norm();
    const nb::gil_scoped_release release;
    const int64_t held = lines(2 * rows * width_);
    uint8_t* memory = scratch(held + products.product_scratch(projections_.kernel(), rows));
    auto* normal = reinterpret_cast<uint16_t*>(memory);
    norms.rms(source, scale, epsilon_before_, rows, width_, normal);
    products.product(projections_.kernel(), normal, rows, outputs, 3, memory + held);
    const int64_t query_heads = parts[0] / head_dim_, key_heads = parts[1] / head_dim_;
    if (of_queries) norms.rms(queries, of_queries, epsilon_heads_, rows * query_heads, head_dim_, queries);
    if (of_keys) norms.rms(keys, of_keys, epsilon_heads_, rows * key_heads, head_dim_, keys);
    norms.rotate(queries, cosines, sines, rows, angles, query_heads, head_dim_, queries);
    norms.rotate(keys, cosines, sines, rows, angles, key_heads, head_dim_, keys);
    if (rows <= kFewRows) {
      const Range read[] = {projections_.range()};
      read_in_order(read, 1);
    }
  }

  // The layer's output [rows][width] for its input x and what its attention gave, [rows][query heads * head_dim].
  void after(uint64_t x, int64_t elements, uint64_t attended, int64_t attended_size, uint64_t norm_weight, uint64_t to,
             int64_t size) const {
    const int64_t rows = rows_in(elements, width_, "x");
    if (rows < 1) refuse("x: no rows");
    if (attended_size != rows * output_.inputs())
      refuse("attended: not " + std::to_string(rows) + " rows of " + std::to_string(output_.inputs()));
    if (size != elements) refuse("to: not the size of x");
    const auto* source = address<const uint16_t>(x, "x");
    const auto* from = address<const uint16_t>(attended, "attended");
    const auto* scale = address<const uint16_t>(norm_weight, "norm");
    auto* target = address<uint16_t>(to, "to");
    const LinearTable& products = linear();
    const NormTable& norms = norm();
    const Matrix &output = output_.kernel(), &gate_up = gate_up_.kernel(), &down = down_.kernel();
    const nb::gil_scoped_release release;
    const int64_t held = lines(2 * rows * width_);
    uint8_t* memory = scratch(held + std::max(products.product_scratch(output, rows),
                                              products.gated_scratch(gate_up, down, rows)));
    auto* normal = reinterpret_cast<uint16_t*>(memory);
    const Output sum{target, width_, source};
    products.product(output, from, rows, &sum, 1, memory + held);
    norms.rms(target, scale, epsilon_after_, rows, width_, normal);
    products.gated(gate_up, down, activation_, normal, rows, {target, width_, target}, memory + held);
    if (rows <= kFewRows) {
      const Range read[] = {output_.range(), gate_up_.range(), down_.range()};
      read_in_order(read, 3);
    }
  }

 private:
  const PackedMatrix &projections_, &output_, &gate_up_, &down_;  // kept alive by the binding
  Activation activation_;
  int64_t width_, head_dim_;
  float epsilon_before_, epsilon_after_, epsilon_heads_;
};

}  // namespace

void bind_layer(nb::module_& module) {
  nb::class_<PackedLayer>(module, "PackedLayer", "A decoder layer around its attention; see kvpager.hf.layer.")
      .def(nb::init<const PackedMatrix&, const PackedMatrix&, const PackedMatrix&, const PackedMatrix&, int, int64_t,
                    double, double, double>(),
           nb::arg("projections"), nb::arg("output"), nb::arg("gate_up"), nb::arg("down"), nb::arg("activation"),
           nb::arg("head_dim"), nb::arg("epsilon_before"), nb::arg("epsilon_after"), nb::arg("epsilon_heads"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("before", &PackedLayer::before)
      .def("after", &PackedLayer::after);
}

}  // namespace kvpager
