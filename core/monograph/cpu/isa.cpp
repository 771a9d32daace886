// The names of the levels and the cap; asking the CPU is in detect_<architecture>.cpp.
#include "monograph/cpu/isa.h"

#include <cstdlib>
#include <string>

#include "monograph/base/error.h"

namespace monograph {
namespace {

constexpr IsaLevel kLevels[] = {
    {Isa::kScalar, "scalar"},          {Isa::kAvx2, "avx2"}, {Isa::kAvx512, "avx512"},
    {Isa::kAvx512Bf16, "avx512_bf16"}, {Isa::kAmx, "amx"},   {Isa::kNeon, "neon"},
};

std::string names_beside(Isa detected) {
  std::string names;
  for (const IsaLevel& level : kLevels)
    if (same_architecture(level.isa, detected))
      names += std::string(names.empty() ? "" : ", ") + level.name;
  return names;
}

}  // namespace

std::span<const IsaLevel> isa_levels() { return kLevels; }

const char* name_of(Isa isa) {
  for (const IsaLevel& level : kLevels)
    if (level.isa == isa) return level.name;
  return "?";
}

std::optional<Isa> isa_named(std::string_view name) {
  for (const IsaLevel& level : kLevels)
    if (name == level.name) return level.isa;
  return std::nullopt;
}

Isa capped_isa(Isa detected, const char* wanted) {
  if (wanted == nullptr || *wanted == '\0') return detected;
  const std::optional<Isa> cap = isa_named(wanted);
  if (!cap)
    throw Error(std::string("MONOGRAPH_ISA is '") + wanted + "'; known are " +
                names_beside(detected));
  if (!same_architecture(*cap, detected))
    throw Error(std::string("MONOGRAPH_ISA is '") + wanted +
                "', of another architecture; known are " + names_beside(detected));
  return *cap < detected ? *cap : detected;
}

Isa best_isa() {
  static const Isa isa = capped_isa(detected_isa(), std::getenv("MONOGRAPH_ISA"));
  return isa;
}

}  // namespace monograph
