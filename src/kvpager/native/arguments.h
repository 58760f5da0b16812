// Arrays that Python hands to a binding: checked for dtype, shape and order before a kernel sees them. Include in
// bindings alone.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "refuse.h"

namespace kvpager {

// A contiguous array of T through the buffer protocol (a third of the cost of a nanobind array). T is const where
// the array is only read. Throws nb::value_error that names the argument.
template <class T>
class Array {
 public:
  // `shape`: sizes, -1 for any
  Array(nanobind::handle from, const char* name, std::initializer_list<int64_t> shape) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
    if (PyObject_GetBuffer(from.ptr(), &buffer_, flags) != 0) {
      PyErr_Clear();
      refuse(name, shape);
    }
    bool right = matches(buffer_.format) && buffer_.ndim == static_cast<int>(shape.size());
    int axis = 0;
    for (const int64_t size : shape) {
      if (!right) break;
      right = size < 0 || buffer_.shape[axis] == size;
      ++axis;
    }
    if (!right) {
      PyBuffer_Release(&buffer_);
      refuse(name, shape);
    }
  }
  ~Array() { PyBuffer_Release(&buffer_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return static_cast<T*>(buffer_.buf); }
  int64_t size(int axis) const { return buffer_.shape[axis]; }

 private:
  using Item = std::remove_const_t<T>;

  static bool matches(const char* format) {
    if (format == nullptr) return std::is_same_v<Item, uint8_t>;
    const std::string_view code(format);
    if constexpr (std::is_same_v<Item, float>) return code == "f";
    if constexpr (std::is_same_v<Item, int64_t>) return code == "q" || (sizeof(long) == 8 && code == "l");
    if constexpr (std::is_same_v<Item, int32_t>) return code == "i";
    if constexpr (std::is_same_v<Item, uint8_t>) return code == "B" || code == "?";
    return false;
  }

  [[noreturn]] static void refuse(const char* name, std::initializer_list<int64_t> shape) {
    std::string text = std::string(name) + ": expected a contiguous " + (std::is_const_v<T> ? "" : "writable ") +
                       (std::is_same_v<Item, float>     ? "float32"
                        : std::is_same_v<Item, int64_t> ? "int64"
                        : std::is_same_v<Item, int32_t> ? "int32"
                                                        : "uint8") +
                       " array [";
    const char* between = "";
    for (const int64_t size : shape) {
      text += between + (size < 0 ? std::string("any") : std::to_string(size));
      between = ", ";
    }
    throw nanobind::value_error((text + "]").c_str());
  }

  Py_buffer buffer_;
};

using Ints = Array<const int64_t>;
using Floats = Array<const float>;

// Every number of an array must be in 0 .. below - 1.
inline void check_range(const Ints& numbers, const char* name, int64_t below) {
  for (int64_t i = 0; i < numbers.size(0); ++i)
    if (numbers.data()[i] < 0 || numbers.data()[i] >= below)
      refuse(is_not(name, numbers.data()[i], "in 0.." + std::to_string(below - 1)));
}

}  // namespace kvpager
