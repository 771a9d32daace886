// The vocabularies built for x86-64, best first. CMake puts the folder of the architecture on the
// include path; this is what stands where other trees have an #if.
#pragma once

#include "monograph/simd/tags.h"

namespace monograph {

using VectorTargets = TargetList<simd::Avx512, simd::Avx2, simd::Scalar>;
using MatrixTargets =
    TargetList<simd::Amx, simd::Avx512Bf16, simd::Avx512, simd::Avx2, simd::Scalar>;

}  // namespace monograph
