#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace kvpager {

namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Between two layers of a decode step the caller is busy in Python for some hundred microseconds: workers that
// sleep then cost more to wake (20 to 50 us) than the work that they get.
constexpr auto kSpin = std::chrono::microseconds(300);

constexpr int64_t kMostItems = 0x7FFFFFFF;  // to be handed out; more are one thread's

thread_local bool inside = false;

class Pool {
 public:
  explicit Pool(int count) : count_(count) {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { serve(i); });
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int count() const { return count_; }

  void run(int64_t items, Work work, void* context) {
    work_ = work;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    state_.store(static_cast<uint64_t>(items) << 32, std::memory_order_release);
    {
      // under the mutex, so that a worker about to sleep can't miss it
      std::lock_guard lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    if (asleep_.load(std::memory_order_acquire) > 0) wake_.notify_all();
    take(0);
    // Only for items that a worker has taken: one that is still asleep, or that the system lets wait while others
    // have the core, finds nothing left when it comes.
    for (int turns = 0; done_.load(std::memory_order_acquire) != items; ++turns) {
      if (turns < 20000) relax(); else std::this_thread::yield();
    }
  }

  void fetch(const Range* ranges, int count) {
    int64_t total = 0;
    fetched_.store(kNothing, std::memory_order_relaxed);
    for (int i = 0; i < kMostRanges; ++i) {
      if (i < count) total += ranges[i].bytes / kChunk * kChunk;
      starts_[i].store(i < count ? ranges[i].from : nullptr, std::memory_order_relaxed);
      ends_[i].store(total, std::memory_order_relaxed);
    }
    fetched_.store(0, std::memory_order_release);
  }

  // Leaves the threads alone: after a fork they exist in the parent only.
  void abandon() {
    for (auto& worker : workers_) worker.detach();
  }

 private:
  void take(int thread) {
    inside = true;
    uint64_t now = state_.load(std::memory_order_acquire);
    while ((now & kNext) < now >> 32) {
      // Who advances the state has an item of the work that is set now, however late he comes: `run` goes on only
      // when that item is done.
      if (!state_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      work_(context_, static_cast<int64_t>(now & kNext), thread);
      done_.fetch_add(1, std::memory_order_release);
      now = state_.load(std::memory_order_acquire);
    }
    inside = false;
  }

  // Fetches one more piece of what is wanted soon; false where there is none. What it reads may be changing: then it
  // fetches something else, and fetching never faults.
  bool fetch_some() {
    const int64_t total = ends_[kMostRanges - 1].load(std::memory_order_relaxed);
    if (fetched_.load(std::memory_order_relaxed) >= total) return false;
    const int64_t piece = fetched_.fetch_add(kChunk, std::memory_order_acq_rel);
    int64_t before = 0;
    for (int i = 0; i < kMostRanges; ++i) {
      const int64_t end = ends_[i].load(std::memory_order_relaxed);
      if (piece < end) {
        const uint8_t* from = starts_[i].load(std::memory_order_relaxed) + (piece - before);
        for (int64_t line = 0; line < kChunk; line += 64) __builtin_prefetch(from + line, 0, 2);
        return true;
      }
      before = end;
    }
    return false;
  }

  void serve(int thread) {
    uint64_t seen = 0;
    while (true) {
      auto until = std::chrono::steady_clock::now() + kSpin;
      int turns = 0;
      while (round_.load(std::memory_order_acquire) == seen && !stop_.load(std::memory_order_relaxed)) {
        if (!fetch_some()) relax();
        if (++turns % 64 == 0 && std::chrono::steady_clock::now() > until) {
          std::unique_lock lock(mutex_);
          asleep_.fetch_add(1);
          wake_.wait(lock, [&] { return round_.load() != seen || stop_.load(); });
          asleep_.fetch_sub(1);
        }
      }
      if (stop_.load()) return;
      seen = round_.load(std::memory_order_acquire);
      take(thread);
    }
  }

  const int count_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint64_t> round_{0};
  static constexpr uint64_t kNext = 0xFFFFFFFFu;
  alignas(64) std::atomic<uint64_t> state_{0};  // how many items there are, and the next one
  alignas(64) std::atomic<int64_t> done_{0};
  Work work_ = nullptr;
  void* context_ = nullptr;
  static constexpr int64_t kChunk = 1024;  // bytes fetched between two looks for work
  static constexpr int64_t kNothing = int64_t{1} << 62;
  alignas(64) std::atomic<int64_t> fetched_{kNothing};
  alignas(64) std::atomic<const uint8_t*> starts_[kMostRanges]{};
  std::atomic<int64_t> ends_[kMostRanges]{};  // of all ranges up to this one together
};

// Never destroyed: threads that are joined while Python shuts down can hang.
struct Shared {
  std::mutex use;  // held while a call uses the pool
  std::unique_ptr<Pool> pool;
  std::atomic<int> wanted{0};  // not set: one
};

Shared& shared() {
  static Shared* const instance = [] {
    auto* made = new Shared;
    pthread_atfork([] { shared().use.lock(); }, [] { shared().use.unlock(); },
                   [] {
                     if (shared().pool) shared().pool.release()->abandon();
                     shared().use.unlock();
                   });
    return made;
  }();
  return *instance;
}

}  // namespace

void run_parallel(int64_t items, Work work, void* context) {
  Shared& state = shared();
  const int wanted = state.wanted.load(std::memory_order_relaxed);
  if (items > 1 && items <= kMostItems && wanted > 1 && !inside && state.use.try_lock()) {
    std::lock_guard lock(state.use, std::adopt_lock);
    if (!state.pool || state.pool->count() != wanted) {
      state.pool.reset();
      state.pool = std::make_unique<Pool>(wanted);
    }
    state.pool->run(items, work, context);
    return;
  }
  for (int64_t item = 0; item < items; ++item) work(context, item, 0);
}

bool beside_others() { return inside; }

void fetch_when_idle(const Range* ranges, int count) {
  Shared& state = shared();
  if (inside || !state.use.try_lock()) return;
  const std::lock_guard lock(state.use, std::adopt_lock);
  if (state.pool) state.pool->fetch(ranges, count < kMostRanges ? count : kMostRanges);
}

int threads() { return shared().wanted.load(); }

void set_threads(int count) {
  if (count < 1 || count > kMostThreads)
    throw std::invalid_argument("threads: " + std::to_string(count) + " is not in 1..256");
  shared().wanted.store(count);
}

}  // namespace kvpager
