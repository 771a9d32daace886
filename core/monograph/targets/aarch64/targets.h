// The vocabularies built for AArch64, best first.
#pragma once

#include "monograph/cpu/tags.h"

namespace monograph {

using TileTargets = TargetList<>;
using VectorTargets = TargetList<simd::Neon, simd::Scalar>;
using MatrixTargets = Joined<TileTargets, VectorTargets>;
// For kernels that are plain loops, which compilers turn into vectors: those of scalar units are
// NEON.
using LoopTargets = TargetList<simd::Scalar>;

}  // namespace monograph
