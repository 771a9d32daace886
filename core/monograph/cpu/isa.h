// Instruction sets a kernel variant may need, and what this CPU offers.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace monograph {

// Ordered: each level includes the ones before it.
enum class Isa : std::uint8_t {
  kScalar,
  kAvx2,        // AVX2, FMA, F16C, BMI2
  kAvx512,      // F, BW, DQ, VL as on Skylake
  kAvx512Bf16,  // adds BF16 and VBMI
  kAmx,         // adds AMX tiles with bf16 and int8, permission granted by the kernel
};
inline constexpr int kIsaCount = 5;

// What the CPU and the operating system support, whatever the environment says. Asks for the AMX
// tile permission once.
Isa detected_isa();

// detected_isa() capped by MONOGRAPH_ISA=scalar|avx2|avx512|avx512_bf16|amx. The cap lowers the
// choice, never raises it. Throws Error for an unknown name.
Isa best_isa();

// The cap as a function of its inputs, for the test: `wanted` is the variable's value or nullptr.
Isa capped_isa(Isa detected, const char* wanted);

const char* name_of(Isa isa);

// The SHA instructions of x86-64, which go with no level above.
bool has_sha_extensions();
std::optional<Isa> isa_named(std::string_view name);

}  // namespace monograph
