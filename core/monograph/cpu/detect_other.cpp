// Architectures without SIMD variants yet: everything runs on the scalar ones.
#include "monograph/cpu/isa.h"

namespace monograph {

Isa detected_isa() { return Isa::kScalar; }

bool has_sha_extensions() { return false; }

}  // namespace monograph
