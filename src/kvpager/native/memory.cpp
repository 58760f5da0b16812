// Memory for frames: page-aligned, in huge pages where the system gives them, between two guard pages.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <stdexcept>

namespace kvpager {

Region::Region(size_t bytes) : bytes_(bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t huge = size_t{1} << 21;
  if (bytes == 0 || bytes > (size_t{1} << 46)) throw std::invalid_argument("memory: not a size");
  const size_t whole = (bytes + page - 1) / page * page;
  // room to align to a huge page, and a guard page at either end
  mapped_ = whole + huge + 2 * page;
  void* map = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  map_ = static_cast<char*>(map);
  const size_t first = reinterpret_cast<size_t>(map_) + page;
  char* aligned = reinterpret_cast<char*>((first + huge - 1) / huge * huge);
  if (mprotect(aligned, whole, PROT_READ | PROT_WRITE) != 0) {
    munmap(map_, mapped_);
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  madvise(aligned, whole, MADV_HUGEPAGE);  // only a hint
#endif
  // the end of the bytes meets the guard page where the size allows 64-byte alignment
  data_ = reinterpret_cast<uint8_t*>(aligned) + (whole - bytes) / 64 * 64;
}

Region::~Region() { munmap(map_, mapped_); }

}  // namespace kvpager
