// Instruction sets a kernel variant may need, and what this CPU offers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace monograph {

// A level of an architecture. Scalar belongs to all of them; each architecture has a range of
// numbers, in which a level includes those below it and scalar. Levels of two architectures have no
// order: no machine, cap or variant list holds both. The numbers leave the library (system_info)
// and are never reused.
enum class Isa : std::uint8_t {
  kScalar = 0,

  // x86-64: 1 to 31.
  kAvx2 = 1,        // AVX2, FMA, F16C, BMI2
  kAvx512 = 2,      // F, BW, DQ, VL as on Skylake
  kAvx512Bf16 = 3,  // adds BF16, on a CPU where its product is not slower than fp32's
  kAmx = 4,         // adds VBMI and AMX tiles with bf16 and int8, permission granted by the kernel

  // AArch64: 32 to 63.
  kNeon = 32,  // Advanced SIMD of Armv8.0-A, which every AArch64 has
};

constexpr bool same_architecture(Isa a, Isa b) {
  constexpr int kRange = 32;
  return a == Isa::kScalar || b == Isa::kScalar ||
         static_cast<int>(a) / kRange == static_cast<int>(b) / kRange;
}

struct IsaLevel {
  Isa isa;
  const char* name;
};

// Every level of every architecture, each architecture's in its order, scalar first.
std::span<const IsaLevel> isa_levels();

const char* name_of(Isa isa);
std::optional<Isa> isa_named(std::string_view name);

// What the CPU and the operating system support, whatever the environment says. Asks for the AMX
// tile permission once.
Isa detected_isa();

// detected_isa() capped by MONOGRAPH_ISA=<name of a level>. The cap lowers the choice, never raises
// it. Throws Error for an unknown name and for a level of another architecture.
Isa best_isa();

// The cap as a function of its inputs, for the test: `wanted` is the variable's value or nullptr.
Isa capped_isa(Isa detected, const char* wanted);

// The SHA instructions of x86-64, which go with no level above.
bool has_sha_extensions();

}  // namespace monograph
