// The variant list; no intrinsics here.
#include "monograph/kernels/experts/experts.h"

#include "monograph/base/error.h"
#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/experts/tiles.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const ExpertsKernels* experts_variant(DType dtype);
// The same in amx.cpp.
template <class V>
const ExpertsTiles* experts_tiles_variant(DType dtype);

const std::vector<Variant<const ExpertsKernels, ByDType>>& experts_variants() {
  static const auto rows = make_variants<const ExpertsKernels>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return experts_variant<V>(key.dtype); });
  return rows;
}

const ExpertsKernels& pick_experts(DType dtype) {
  const ExpertsKernels* kernels = pick(experts_variants(), dtype);
  if (kernels == nullptr) throw Error("experts: no variant for this type");
  return *kernels;
}

const std::vector<Variant<const ExpertsTiles, ByDType>>& experts_tiles_variants() {
  static const auto rows = make_variants<const ExpertsTiles>(
      TileTargets{}, every_dtype(),
      []<class V>(ByDType key) { return experts_tiles_variant<V>(key.dtype); });
  return rows;
}

const ExpertsTiles* pick_experts_tiles(DType dtype) {
  return pick(experts_tiles_variants(), dtype);
}

}  // namespace monograph
