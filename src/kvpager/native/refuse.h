// How a wrong argument is refused: with a ValueError that names it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvpager {

[[noreturn]] inline void refuse(const std::string& problem) { throw std::invalid_argument(problem); }

inline void require(bool holds, const std::string& problem) {
  if (!holds) refuse(problem);
}

inline std::string is_not(const char* name, int64_t value, const std::string& allowed) {
  return std::string(name) + ": " + std::to_string(value) + " is not " + allowed;
}

}  // namespace kvpager
