// The vocabularies built for architectures without SIMD variants.
#pragma once

#include "monograph/cpu/tags.h"

namespace monograph {

using TileTargets = TargetList<>;
using VectorTargets = TargetList<simd::Scalar>;
using MatrixTargets = Joined<TileTargets, VectorTargets>;
// For kernels that are plain loops, which compilers turn into vectors.
using LoopTargets = VectorTargets;

}  // namespace monograph
