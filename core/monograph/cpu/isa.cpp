// The names of the instruction sets and the cap; asking the CPU is in detect_<architecture>.cpp.
#include "monograph/cpu/isa.h"

#include <cstdlib>
#include <string>

#include "monograph/base/error.h"

namespace monograph {
namespace {

constexpr const char* kNames[kIsaCount] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};

}  // namespace

const char* name_of(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::optional<Isa> isa_named(std::string_view name) {
  for (int i = 0; i < kIsaCount; ++i)
    if (name == kNames[i]) return static_cast<Isa>(i);
  return std::nullopt;
}

Isa capped_isa(Isa detected, const char* wanted) {
  if (wanted == nullptr || *wanted == '\0') return detected;
  const std::optional<Isa> cap = isa_named(wanted);
  if (!cap)
    throw Error(std::string("MONOGRAPH_ISA is '") + wanted +
                "'; known are scalar, avx2, avx512, avx512_bf16, amx");
  return *cap < detected ? *cap : detected;
}

Isa best_isa() {
  static const Isa isa = capped_isa(detected_isa(), std::getenv("MONOGRAPH_ISA"));
  return isa;
}

}  // namespace monograph
