// Pages to swap and back. The checksum is made of the same vectors that are copied, so it costs little beside the copy.
#include "swap.h"

#include <algorithm>

#include "threads.h"
#include "vec.h"

namespace kvpager::KV_ISA {

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kBatch = 1 << 16;  // bytes that one thread takes at a time
constexpr int64_t kAhead = 512;      // bytes of the next page that are asked for early, until the hardware sees the run

// One to one in `sum` and in `x`: a number that changed always changes the sum, whatever came before it. High bits
// are brought down before the product, which only carries upward: none has an effect that another could take back.
KV_INLINE u32x16 mixed(u32x16 sum, u32x16 x) {
  sum ^= x;
  sum ^= sum >> 15;
  return sum * 0x9E3779B1u;
}

// Copies a page and returns its checksum, the same for every instruction set. A change of a single number of four
// bytes is always seen; any other with odds of all but 2^-32.
uint64_t copy_page(uint8_t* to, const uint8_t* from, int64_t bytes) {
  u32x16 sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = u32x16{} + 0x85EBCA6Bu * static_cast<uint32_t>(i + 1);
  int64_t at = 0;
  for (; at + 4 * kLine <= bytes; at += 4 * kLine)
    for (int i = 0; i < 4; ++i) {  // four sums, for one would wait for itself
      const u32x16 x = load<u32x16>(from + at + i * kLine);
      store(to + at + i * kLine, x);
      sums[i] = mixed(sums[i], x);
    }
  for (; at < bytes; at += kLine) {
    const auto left = static_cast<size_t>(std::min(kLine, bytes - at));
    u32x16 x = {};
    std::memcpy(&x, from + at, left);
    std::memcpy(to + at, &x, left);
    sums[0] = mixed(sums[0], x);
  }
  u32x16 sum = sums[0];
  for (int i = 1; i < 4; ++i) sum = mixed((sum << 13) | (sum >> 19), sums[i]);  // turned: all start alike
  uint64_t words[8];
  std::memcpy(words, &sum, sizeof words);
  uint64_t all = static_cast<uint64_t>(bytes);
  for (const uint64_t word : words) {
    all ^= word;
    all ^= all >> 29;
    all *= 0x9FB21C651E98DF25u;
  }
  return all ^ (all >> 32);
}

uint8_t* place(const SwapArgs& a, int64_t slot) {
  const int64_t slab = std::upper_bound(a.starts, a.starts + a.slab_count, slot) - a.starts - 1;
  return reinterpret_cast<uint8_t*>(a.slabs[slab]) + (slot - a.starts[slab]) * a.page_bytes;
}

void copy(const SwapArgs& a, bool to_slots) {
  const int64_t batch = std::max<int64_t>(1, kBatch / a.page_bytes);
  parallel((a.pages + batch - 1) / batch, [&](int64_t item, int) {
    const int64_t stop = std::min(a.pages, (item + 1) * batch);
    for (int64_t i = item * batch; i < stop; ++i) {
      uint8_t* slot = place(a, a.slots[i]);
      uint8_t* row = a.memory + a.rows[i] * a.page_bytes;
      if (i + 1 < stop) {
        const uint8_t* next = to_slots ? a.memory + a.rows[i + 1] * a.page_bytes : place(a, a.slots[i + 1]);
        for (int64_t ahead = 0; ahead < std::min(kAhead, a.page_bytes); ahead += kLine) __builtin_prefetch(next + ahead);
      }
      a.sums[i] = to_slots ? copy_page(slot, row, a.page_bytes) : copy_page(row, slot, a.page_bytes);
    }
  });
}

constexpr SwapTable kTable{copy};

}  // namespace

const SwapTable& swap_table() { return kTable; }

}  // namespace kvpager::KV_ISA
