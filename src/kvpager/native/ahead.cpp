#include "ahead.h"

#include <mutex>
#include <unordered_map>

#include "threads.h"

namespace kvpager {

namespace {

// What one core fetches while Python runs between two products (some 200 us) is about this much; all of it must stay
// in the last cache beside what Python itself needs.
constexpr int64_t kMostBytes = int64_t{6} << 20;
constexpr size_t kMostKnown = 1 << 16;  // ranges; models that are gone leave theirs behind

struct Order {
  std::mutex mutex;
  std::unordered_map<const uint8_t*, Range> next;
  const uint8_t* last = nullptr;
};

Order& order() {
  static Order* const instance = new Order;  // never destroyed: threads may still run when Python ends
  return *instance;
}

}  // namespace

void read_in_order(const Range* ranges, int count) {
  Range ahead[kMostRanges];
  int found = 0;
  {
    Order& known = order();
    const std::lock_guard lock(known.mutex);
    if (known.next.size() > kMostKnown) known.next.clear();
    for (int i = 0; i < count; ++i) {
      if (known.last != nullptr) known.next[known.last] = ranges[i];
      known.last = ranges[i].from;
    }
    int64_t left = kMostBytes;
    auto at = known.next.find(known.last);
    while (at != known.next.end() && found < kMostRanges && left > 0) {
      const Range range = at->second;
      ahead[found++] = {range.from, range.bytes < left ? range.bytes : left};
      left -= range.bytes;
      at = known.next.find(range.from);
    }
  }
  fetch_when_idle(ahead, found);
}

}  // namespace kvpager
