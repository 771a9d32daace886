// The vocabularies built for x86-64, best first. CMake puts the folder of the architecture on the
// include path; this is what stands where other trees have an #if.
#pragma once

#include "monograph/cpu/tags.h"

namespace monograph {

// With units for tiles.
using TileTargets = TargetList<simd::Amx>;
using VectorTargets = TargetList<simd::Avx512, simd::Avx2, simd::Scalar>;
using MatrixTargets = Joined<TileTargets, VectorTargets>;
// For kernels that are plain loops, which compilers turn into vectors.
using LoopTargets = VectorTargets;

}  // namespace monograph
