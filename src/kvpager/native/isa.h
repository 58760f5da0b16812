// Which instruction set the kernels use: the best that this processor has, unless set_isa says otherwise.
#pragma once

#include <string>
#include <vector>

namespace kvpager {

enum class Isa { generic, avx2, avx512, avx512bf16 };

// Names, as in KVPAGER_ISA and in reports; "generic" is the architecture's baseline (NEON on 64-bit Arm).
const char* isa_name(Isa isa);
// Those that this build has and this processor can run, the best one last.
std::vector<Isa> available_isas();
Isa active_isa();
// Throws std::invalid_argument for a name that is not available.
void set_isa(const std::string& name);

// Kernel sources are compiled once for each instruction set, in namespace kvpager::KV_ISA, and hand out a table of
// functions. KV_DECLARE_TABLE(Table, name) declares the tables and Table const& name(), the one of the active set.
#ifdef KV_X86
#define KV_DECLARE_TABLE(Table, name)                                       \
  namespace generic { const Table& name##_table(); }                        \
  namespace avx2 { const Table& name##_table(); }                           \
  namespace avx512 { const Table& name##_table(); }                         \
  namespace avx512bf16 { const Table& name##_table(); }                     \
  inline const Table& name() {                                              \
    switch (active_isa()) {                                                 \
      case Isa::avx2: return avx2::name##_table();                          \
      case Isa::avx512: return avx512::name##_table();                      \
      case Isa::avx512bf16: return avx512bf16::name##_table();              \
      default: return generic::name##_table();                              \
    }                                                                       \
  }
#else
#define KV_DECLARE_TABLE(Table, name)                                       \
  namespace generic { const Table& name##_table(); }                        \
  inline const Table& name() { return generic::name##_table(); }
#endif

}  // namespace kvpager
