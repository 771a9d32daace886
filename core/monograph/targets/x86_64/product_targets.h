// The vocabularies with units for products of matrices, best first.
#pragma once

#include "monograph/cpu/pair_tags.h"
#include "targets.h"

namespace monograph {

using PairTargets = TargetList<simd::Avx512Bf16>;
using ProductTargets = Joined<TileTargets, Joined<PairTargets, VectorTargets>>;

}  // namespace monograph
