// Products with packed weights: y = x W^T + bias, for bfloat16 inputs and outputs and weights of bfloat16 or int8.
//
// Outputs are packed in groups of 32, two blocks of 16; a group is one stream of memory, so that a product with few rows
// reads the weights once, in order:
//
//   bfloat16  [groups][pairs][2 blocks][16 outputs][2 inputs]
//   int8      the same, with a float scale for each output
//
// One step of a group (a pair of inputs, 32 outputs) is two vectors as dot-product instructions want them. Every output is
// summed over the inputs in one fixed order, whatever the number of rows and threads: a row's result does not depend on
// the rows beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace kvpager {

enum class Weights : int { bfloat16 = 0, int8 = 1 };
enum class Activation : int { silu = 0, gelu_tanh = 1, gelu = 2 };

constexpr int kLanes = 16;          // outputs of a block
constexpr int kGroup = 2 * kLanes;  // outputs of a group
constexpr int kChunk = 256;         // pairs of inputs that share one scale of int8's inputs

// The bytes of one pair of inputs for a group's outputs.
constexpr int64_t step_bytes(Weights weights) { return weights == Weights::bfloat16 ? 4 * kGroup : 2 * kGroup; }

// A packed matrix as kernels see it; what does not fill a group or a pair is zero.
struct Matrix {
  Weights weights;
  const uint8_t* packed;
  const float* scales;  // [groups][32], int8 only
  const float* bias;    // [groups][32], or null
  int64_t inputs, pairs, groups;
};

// Where a run of groups goes: bfloat16 [rows][outputs]. What is `added`, of the same shape, or null, is added to what was
// rounded, and the sum is rounded; it may be `to`.
struct Output {
  uint16_t* to;
  int64_t outputs;
  const uint16_t* added = nullptr;
};

struct LinearTable {
  // Bytes of scratch memory for a product, and for a gated one.
  int64_t (*product_scratch)(const Matrix& matrix, int64_t rows);
  int64_t (*gated_scratch)(const Matrix& gate_up, const Matrix& down, int64_t rows);
  // x is bfloat16 [rows][inputs]. The outputs' groups follow each other, `count` of them.
  void (*product)(const Matrix& matrix, const uint16_t* x, int64_t rows, const Output* outputs, int count,
                  uint8_t* scratch);
  // down(act(gate(x)) * up(x)) to `y`; gate_up's groups hold a block of the gate and the block
  // of `up` that belongs to it. Rounded to bfloat16 after each of gate, act, up and their product, as PyTorch's modules do.
  void (*gated)(const Matrix& gate_up, const Matrix& down, Activation activation, const uint16_t* x, int64_t rows,
                const Output& y, uint8_t* scratch);
};

KV_DECLARE_TABLE(LinearTable, linear)

}  // namespace kvpager
