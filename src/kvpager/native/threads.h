// A small persistent pool of threads for the kernels: the caller works too, and others wait by spinning briefly.
#pragma once

#include <cstdint>

#include "ahead.h"

namespace kvpager {

using Work = void (*)(void* context, int64_t item, int thread);

// Runs work(context, item, thread) for every item in [0, items), and returns when all are done; `thread` is below
// max(threads(), 1). Items are handed out one by one, in order. What an item computes must not depend on `thread`.
// From inside an item, or while another thread of the program uses the pool, the items run in the calling thread.
void run_parallel(int64_t items, Work work, void* context);

// As run_parallel, with a callable f(item, thread).
template <class F>
inline void parallel(int64_t items, F&& f) {
  run_parallel(
      items, [](void* context, int64_t item, int thread) { (*static_cast<F*>(context))(item, thread); }, &f);
}

// Whether the caller is an item that runs beside others.
bool beside_others();

constexpr int kMostRanges = 8;

// Lets the pool's threads fetch these ranges into the cache while they wait for work, up to kMostRanges, in order, in
// the place of what they were to fetch before. Only a hint: memory that is gone by then does no harm.
void fetch_when_idle(const Range* ranges, int count);

// 0 until set_threads was called: one thread is used then.
int threads();
// Throws std::invalid_argument when `count` is not in 1..256.
void set_threads(int count);
constexpr int kMostThreads = 256;

}  // namespace kvpager
