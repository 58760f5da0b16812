#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace kvpager {

namespace {

bool runs(Isa isa) {
#ifdef KV_X86
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  switch (isa) {
    case Isa::avx2: return v3;
    case Isa::avx512: return v4;
    case Isa::avx512bf16:
      return v4 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    default: return true;
  }
#else
  return isa == Isa::generic;
#endif
}

std::atomic<int> active{-1};

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512bf16: return "avx512bf16";
    default: return "generic";
  }
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
  for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512bf16})
    if (runs(isa)) found.push_back(isa);
  return found;
}

Isa active_isa() {
  int chosen = active.load(std::memory_order_relaxed);
  if (chosen < 0) {
    chosen = static_cast<int>(available_isas().back());
    active.store(chosen, std::memory_order_relaxed);
  }
  return static_cast<Isa>(chosen);
}

void set_isa(const std::string& name) {
  for (Isa isa : available_isas())
    if (name == isa_name(isa)) {
      active.store(static_cast<int>(isa), std::memory_order_relaxed);
      return;
    }
  throw std::invalid_argument("isa: '" + name + "' is not available here");
}

}  // namespace kvpager
