#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpager {

// Zeroed bytes, aligned to 64, that the system provides as they are touched. Reading or writing outside of them
// (beyond the alignment) faults. Throws std::bad_alloc, or std::invalid_argument for a size of 0 or beyond 2^46.
class Region {
 public:
  explicit Region(size_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  size_t mapped_ = 0;
  char* map_ = nullptr;
  uint8_t* data_ = nullptr;
};

}  // namespace kvpager
