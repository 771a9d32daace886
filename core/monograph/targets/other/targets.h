// The vocabularies built for architectures without SIMD variants. NEON will be added to these lists
// in a folder of its own.
#pragma once

#include "monograph/simd/tags.h"

namespace monograph {

using VectorTargets = TargetList<simd::Scalar>;
using MatrixTargets = TargetList<simd::Scalar>;

}  // namespace monograph
