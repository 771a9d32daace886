// Advanced SIMD is a part of every AArch64: there is nothing to ask.
#include "monograph/cpu/isa.h"

namespace monograph {

Isa detected_isa() { return Isa::kNeon; }

bool has_sha_extensions() { return false; }

}  // namespace monograph
