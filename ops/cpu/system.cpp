// monograph::system_info: what the library was built with and what it picked, as numbers.
#include "monograph/cpu/isa.h"
#include "stable.h"

namespace monograph::ops {
namespace {

// [chosen ISA, ISA of the machine]
std::vector<std::int64_t> system_info() {
  return {static_cast<std::int64_t>(best_isa()), static_cast<std::int64_t>(detected_isa())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CompositeExplicitAutograd, m) {
  m.impl("system_info", TORCH_BOX(&system_info));
}

}  // namespace monograph::ops
