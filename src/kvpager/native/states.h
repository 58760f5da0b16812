// Keys, values, queries and outputs as they lie in a program's memory: [heads][tokens][channels] by strides, in float32,
// float16 or bfloat16 (which Python hands over as uint16). For bindings alone.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "isa.h"
#include "pages.h"

namespace kvpager {

KV_DECLARE_TABLE(PagesTable, pages)

class States {
 public:
  // Throws nb::value_error, which names the argument, where it is no such array: `heads`, `tokens` -1 for any.
  States(nanobind::handle from, const char* name, int64_t heads, int64_t tokens, int64_t channels, bool writable = false) {
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(from.ptr(), &buffer_, flags) != 0) {
      PyErr_Clear();
      refuse(name, heads, tokens, channels);
    }
    if (!matches(heads, tokens, channels)) {
      PyBuffer_Release(&buffer_);
      refuse(name, heads, tokens, channels);
    }
  }
  ~States() { PyBuffer_Release(&buffer_); }
  States(const States&) = delete;

  int64_t heads() const { return buffer_.shape[0]; }
  int64_t tokens() const { return buffer_.shape[1]; }
  int64_t channels() const { return buffer_.shape[2]; }
  DType dtype() const { return dtype_; }

  void read(int64_t head, int64_t token, float* to) const { pages().widen(dtype_, at(head, token), to, channels()); }
  void write(int64_t head, int64_t token, const float* from) const {
    pages().narrow(dtype_, from, at(head, token), channels());
  }
  // Whether all numbers are in -most..most; NaN is not.
  bool within(float most) const {
    for (int64_t head = 0; head < heads(); ++head)
      for (int64_t token = 0; token < tokens(); ++token)
        if (!pages().within(dtype_, at(head, token), channels(), most)) return false;
    return true;
  }

 private:
  uint8_t* at(int64_t head, int64_t token) const {
    return static_cast<uint8_t*>(buffer_.buf) + head * buffer_.strides[0] + token * buffer_.strides[1];
  }

  bool matches(int64_t heads, int64_t tokens, int64_t channels) {
    const std::string_view format(buffer_.format ? buffer_.format : "");
    if (format == "f") dtype_ = DType::float32;
    else if (format == "e") dtype_ = DType::float16;
    else if (format == "H") dtype_ = DType::bfloat16;
    else return false;
    if (buffer_.ndim != 3 || buffer_.strides[2] != buffer_.itemsize) return false;
    const int64_t wanted[3] = {heads, tokens, channels};
    for (int axis = 0; axis < 3; ++axis)
      if (buffer_.shape[axis] < 1 || (wanted[axis] >= 0 && buffer_.shape[axis] != wanted[axis])) return false;
    return true;
  }

  [[noreturn]] static void refuse(const char* name, int64_t heads, int64_t tokens, int64_t channels) {
    auto word = [](int64_t size) { return size < 0 ? std::string("any") : std::to_string(size); };
    throw nanobind::value_error((std::string(name) + ": expected float32, float16 or uint16 (bfloat16) numbers [" +
                                 word(heads) + ", " + word(tokens) + ", " + word(channels) + "], channels side by side")
                                    .c_str());
  }

  Py_buffer buffer_;
  DType dtype_ = DType::float32;
};

}  // namespace kvpager
