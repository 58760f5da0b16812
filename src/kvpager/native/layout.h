// How a page lies in its frame. One frame holds the keys of one page, then its values, then (int8) their scales:
//
//   float32   keys [P/B][D][B]      values [P][D]
//   float16   keys [P/B][D][B]      values [P][D]
//   bfloat16  keys [P/B][D/2][B][2] values [P/2][D][2]
//   int8      keys [P/B][D/2][B][2] values [P/2][D][2], then bfloat16 key scales [D], bfloat16 value scales [P],
//             then bytes up to a multiple of 64
//
// P is the page size (8, 16 or 32), D the head dimension (a multiple of 8 up to 256), B = min(P, 16) the tokens that
// fill a vector. Keys are transposed: one load holds the same channel (or pair of channels) of B tokens, so scores
// need no sums across a vector. Pairs lie together as dot-product instructions want them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpager {

enum class DType : int { float32 = 0, float16 = 1, bfloat16 = 2, int8 = 3 };

struct Layout {
  DType dtype;
  int page_size;  // P
  int head_dim;   // D
  int block;      // B
  size_t values;  // offset of the values
  size_t key_scales, value_scales;  // offsets, int8 only
  size_t page_bytes;

  static constexpr Layout of(DType dtype, int page_size, int head_dim) {
    const size_t item = dtype == DType::float32 ? 4 : dtype == DType::int8 ? 1 : 2;
    const size_t half = item * static_cast<size_t>(page_size) * static_cast<size_t>(head_dim);
    Layout l{dtype, page_size, head_dim, page_size < 16 ? page_size : 16, half, 2 * half, 2 * half, 2 * half};
    if (dtype == DType::int8) {
      l.value_scales = l.key_scales + 2 * static_cast<size_t>(head_dim);
      l.page_bytes = (l.value_scales + 2 * static_cast<size_t>(page_size) + 63) / 64 * 64;
    }
    return l;
  }
};

}  // namespace kvpager
