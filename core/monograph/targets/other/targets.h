// The vocabularies built for architectures without SIMD variants. NEON will be added to these lists
// in a folder of its own.
#pragma once

#include "monograph/cpu/tags.h"

namespace monograph {

using TileTargets = TargetList<>;
using VectorTargets = TargetList<simd::Scalar>;
using MatrixTargets = Joined<TileTargets, VectorTargets>;

}  // namespace monograph
